"""A process of ours that confines itself. Each test does so in a process of its own: there is no way back."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rewards import confine
from rewards.contract import RewardError

pytestmark = pytest.mark.timeout(60)
landlock_only = pytest.mark.parametrize("rung", ["landlock"], indirect=True)

ATTEMPTS = """
import asyncio, os, socket, sys, threading
from rewards.confine import confine_here
{before}
confine_here([{read!r}, *sys.path], [{write!r}]{options})
def attempt(name, action):
    try:
        action()
    except OSError as error:
        print(name, "refused")
    else:
        print(name, "done")
attempt("read", lambda: open({read!r} + "/given").read())
attempt("write", lambda: open({write!r} + "/new", "w").write("x"))
attempt("write what is read", lambda: open({read!r} + "/given", "w"))
attempt("read elsewhere", lambda: open("/etc/passwd"))
attempt("socket", lambda: socket.socket())
attempt("fork", os.fork)
attempt("signal", lambda: os.kill(os.getppid(), 0))
attempt("program", lambda: os.execv("/bin/true", ["true"]))
attempt("own pipe", lambda: os.write(1, b""))
attempt("import", lambda: __import__("colorsys"))
attempt("event loop", lambda: asyncio.run(asyncio.sleep(0)))
thread = threading.Thread(target=attempt, args=("read in a thread", lambda: open("/etc/passwd")))
thread.start(); thread.join()
{after}
"""


@pytest.fixture
def attempts(rung, tmp_path):
    """What a confined process may do: a dict of attempts."""
    for folder in ("read", "write"):
        (tmp_path / folder).mkdir()
    (tmp_path / "read" / "given").write_text("x")

    def run(before="", after="", options=""):
        program = ATTEMPTS.format(
            before=before, after=after, options=options, read=str(tmp_path / "read"), write=str(tmp_path / "write")
        )
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
        )
        assert ran.returncode == 0, ran
        return dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())

    return run


DONE = {"read", "write", "own pipe", "import", "event loop"}
REFUSED = {"write what is read", "read elsewhere", "socket", "fork", "signal", "program", "read in a thread"}


@landlock_only
def test_what_is_given_works_and_all_else_is_refused(attempts):
    assert attempts() == dict.fromkeys(DONE, "done") | dict.fromkeys(REFUSED, "refused")


@landlock_only
def test_open_sockets_stay_usable_and_new_ones_can_be_allowed(attempts):
    before = "ours, theirs = socket.socketpair()"
    after = "attempt('open socket', lambda: (ours.sendall(b'x'), theirs.recv(1)))"
    assert attempts(before, after)["open socket"] == "done"
    connect = "[s := socket.create_server(('127.0.0.1', 0)), socket.create_connection(s.getsockname())]"
    got = attempts(after=f"attempt('connect', lambda: {connect})", options=", sockets=True")
    assert (got["socket"], got["connect"], got["fork"], got["read elsewhere"]) == ("done", "done", "refused", "refused")


@landlock_only
def test_other_threads_are_an_error_that_changes_nothing(attempts):
    """Landlock binds the calling thread and those it starts: another one would stay free."""
    program = """
        import threading, time
        from rewards.confine import confine_here
        threading.Thread(target=time.sleep, args=(1,)).start()
        try:
            confine_here([])
        except Exception as error:
            print(type(error).__name__, error)
        print(len(open("/etc/passwd").read()) > 0)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=True)
    error, after = ran.stdout.splitlines()
    assert error.startswith("RewardError this process can not be confined: it has 2 threads")
    assert after == "True"


def test_a_machine_without_landlock_or_another_one_is_told(monkeypatch):
    for name, value, words in (
        ("rewards.confine.landlock_abi", lambda: -1, "the kernel has no Landlock.*5.13.*lsm=landlock"),
        ("rewards.confine.platform.machine", lambda: "riscv64", "written for Linux on x86_64 and aarch64, not linux on riscv64"),
    ):
        confine.missing.cache_clear(), confine.missing_filter.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            with pytest.raises(RewardError, match=words):
                confine.confine_here([])
        confine.missing.cache_clear(), confine.missing_filter.cache_clear()


def test_older_interfaces_of_landlock_are_not_asked_for_more(monkeypatch, tmp_path):
    """The rights that each version knows, as the kernel's documentation counts them: 13, +refer, +truncate, -, +devices."""
    for abi, num_rights, num_bytes in (
        (1, 13, 8),
        (2, 14, 8),
        (3, 15, 8),
        (4, 15, 16),
        (5, 16, 16),
        (6, 16, 24),
        (7, 16, 24),
        (9, 16, 24),
    ):
        monkeypatch.setattr("rewards.confine.landlock_abi", lambda abi=abi: abi)
        attributes, rules = confine.landlock([], [str(tmp_path)], sockets=False)
        handled = int.from_bytes(attributes[:8], "little")
        assert (handled.bit_length(), handled.bit_count(), len(attributes)) == (num_rights, num_rights, num_bytes)
        assert all(rights & ~handled == 0 for _, rights in rules)
        allowed = dict(rules)[str(tmp_path)]
        assert allowed & 1 == 0  # nothing there can be executed


@pytest.mark.skipif(not os.path.exists("/usr/include/asm-generic/unistd.h"), reason="the kernel's headers are not installed")
def test_the_table_of_calls_agrees_with_the_kernels_headers():
    names = {"3264_fstatat": "newfstatat"}
    generic = {}
    for line in Path("/usr/include/asm-generic/unistd.h").read_text().splitlines():
        words = line.split()
        if len(words) >= 3 and words[:1] == ["#define"] and words[1].startswith("__NR") and words[2].isdigit():
            name = words[1].removeprefix("__NR").lstrip("_")
            generic[names.get(name, name.removeprefix("3264_"))] = int(words[2])
    table = confine._numbers(confine._ALLOWED + confine._SOCKETS + confine._CONDITIONAL, 2)
    assert len(table) > 100
    assert {name: generic.get(name) for name in table} == table


def test_this_machines_table_agrees_with_its_headers():
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.exists(header):
        pytest.skip("no headers of an x86-64 kernel here")
    words = [line.split() for line in Path(header).read_text().splitlines()]
    numbers = {
        w[1].removeprefix("__NR_"): int(w[2]) for w in words if len(w) == 3 and w[1].startswith("__NR_") and w[2].isdigit()
    }
    table = confine._numbers(confine._ALLOWED + confine._SOCKETS + confine._CONDITIONAL, 1)
    assert {name: numbers.get(name) for name in table} == table
