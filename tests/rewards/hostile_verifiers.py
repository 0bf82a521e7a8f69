"""A user's file of verifiers, most of which misbehave when the completion tells them to. Loaded by path in the pool's processes."""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from rewards.contract import Abstain, InvalidItem

print("a user's module may print while it is imported")

JUNK = {
    "none": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "list": [1.0],
    "tuple": (1.0, 0.0),
    "text": "1.0",
    "array": np.ones((3, 1)),
    "array_of_one": np.ones(1),
    "complex": 1j,
    "too_large": 10**400,
    "accuracy_above_one": {"value": 1.0, "accuracy": 1.5},
    "unknown_key": {"value": 1.0, "acuracy": 1.0},
    "no_value": {"accuracy": 1.0},
    "unknown_outcome": {"value": 1.0, "outcome": "great"},
    "half_a_name": {"value": 1.0, "measures": {"half a \ud800": 1.0}},
    "long_name": {"value": 1.0, "measures": {"x" * 101: 1.0}},
    "no_name": {"value": 1.0, "measures": {3: 1.0}},
    "many_measures": {"value": 1.0, "measures": dict.fromkeys(map(str, range(101)), 1.0)},
}


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def obey(completion, answer):
    """Does what the completion says; else compares it with the answer."""
    word, _, argument = completion.partition(" ")
    act = ACTS.get(word)
    return act(argument) if act is not None else float(completion == answer)


def _sleep(_):
    time.sleep(3600)


def _nap(seconds):
    time.sleep(float(seconds))
    return 1.0


def _hold_interpreter(_):
    sum(range(10**14))


def _ignore_signals(_):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def _note(path, pid=None):
    """Append our process id, or a child's, so that a test can look for it."""
    with open(path, "a") as file:
        file.write(f"{pid or os.getpid()}\n")


def _family(path):
    """A child, a child in a session of its own, and an orphan in a session of its own; then sleep for ever."""
    _note(path)
    program = f"import os, time; open({path!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", program])
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    time.sleep(3600)


def _fork_and_return(path):
    if os.fork() == 0:
        _note(path)
    return 1.0


def _fork_and_die(path):
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    _note(path, child)  # not the child itself: it may be ended before it gets so far
    os._exit(7)


def _escape_and_die(path):
    """Leaves a child in a session of its own, an orphan in another, and one that becomes ever another process."""
    program = f"import os, time; open({path!r}, 'a').write(str(os.getpid()) + chr(10)); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    if os.fork() == 0:
        os.setsid()
        while os.fork() == 0:
            _note(path)
        os._exit(0)
    while Path(path).read_text().count("\n") < 20:
        time.sleep(0.01)
    os._exit(3)


def _many_forks(path):
    for number in range(60):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            _note(path)
            time.sleep(3600)
    time.sleep(3600)


def _relays(folder):
    """Forty lines of processes, each of which starts the next and ends; they stand in a folder to be known by."""
    os.chdir(folder)
    for _ in range(40):
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork():
                    os._exit(0)
    time.sleep(3600)


def _bomb(folder):
    """Every process starts others without end; a hundred at once, by the kernel's count for a user, which is none for root."""
    os.chdir(folder)
    if os.getuid() == 0:
        os.setgroups([])
        os.setuid(54321)
    mine = [p for p in Path("/proc").glob("[0-9]*/task/*") if p.exists() and p.stat().st_uid == os.getuid()]
    resource.setrlimit(resource.RLIMIT_NPROC, (len(mine) + 100,) * 2)
    while True:
        with contextlib.suppress(BlockingIOError):
            os.fork()


def _scribble(text):
    """Writes into every open file but the first three: the pool's connection is among them."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.write(fd, text.encode() + b"\n")
    return 1.0


_kept = []


def _keep_memory(mib):
    _kept.append(bytearray(int(mib) * 2**20))
    return {"value": 1.0, "extracted": str(os.getpid())}


def _cpu_limit(_):
    room = resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()
    return {"value": room, "extracted": str(os.getpid())}


def _print(_):
    for _ in range(2000):
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
    os.write(1, b'["done", 0, "ok"]\n' * 1000)
    subprocess.run(["echo", "from a child"], check=True)
    return 1.0


def _print_for_ever(_):
    while True:
        print("x" * 1000)


def _allocate(_):
    hog = []
    while True:
        hog.append(bytearray(2**26))


def _raise(_):
    raise ConnectionError("the judge is away")


def _give_up(kind):
    raise {"abstain": Abstain, "invalid": InvalidItem, "timeout": TimeoutError}[kind]("as told")


def _recurse(argument):
    return _recurse(argument)


def _unprintable(_):
    raise Unprintable


def _burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


ACTS = {
    "sleep": _sleep,
    "nap": _nap,
    "hold_interpreter": _hold_interpreter,
    "ignore_signals": _ignore_signals,
    "family": _family,
    "fork_and_return": _fork_and_return,
    "fork_and_die": _fork_and_die,
    "escape_and_die": _escape_and_die,
    "many_forks": _many_forks,
    "relays": _relays,
    "bomb": _bomb,
    "keep_memory": _keep_memory,
    "cpu_limit": _cpu_limit,
    "burn": lambda seconds: _burn(float(seconds)),
    "pid": lambda _: {"value": 1.0, "extracted": str(os.getpid())},
    "kill_group": lambda _: os.killpg(os.getpgrp(), signal.SIGKILL),
    "kill_supervisor": lambda _: os.kill(os.getppid(), signal.SIGTERM) or time.sleep(3600),
    "scribble": _scribble,
    "close_all": lambda _: os.closerange(3, 256),
    "print": _print,
    "print_for_ever": _print_for_ever,
    "allocate": _allocate,
    "exit": lambda code: os._exit(int(code)),
    "sys_exit": lambda code: sys.exit(int(code)),
    "kill": lambda name: os.kill(os.getpid(), getattr(signal, name)),
    "segfault": lambda _: ctypes.string_at(0),
    "raise": _raise,
    "give_up": _give_up,
    "unprintable": _unprintable,
    "recurse": _recurse,
    "junk": lambda kind: JUNK[kind],
    "getenv": lambda name: {"value": 0.0, "extracted": os.environ.get(name, "")},
    "modules": lambda _: {"value": 0.0, "extracted": ",".join(sorted(sys.modules))},
}


async def later(completion, answer):
    """Async, and uses one loop for all its calls."""
    await asyncio.sleep(0.001)
    return {"value": completion == answer, "extracted": str(id(asyncio.get_running_loop()))}


def everything(prompt, completion, answer, prompt_id, *, scale: float):
    return {"value": scale, "accuracy": 1.0, "extracted": f"{prompt}|{completion}|{answer}|{prompt_id}"}


def only_answer(answer, /):
    return answer


def all_by_name(**given):
    return {"value": 0.0, "extracted": ",".join(sorted(given))}


def length(completion):
    return len(completion)


def needs_more(completion, gold):
    return 1.0


def seen(completion, answer, *, path: str):
    """Notes every call, then obeys."""
    with open(path, "a") as file:
        file.write(f"{completion}\n")
    return obey(completion, answer)


def flaky(completion, *, path: str):
    """``fails N KIND``: N times, then 1. Every call is noted with its process."""
    with open(path, "a+") as file:
        file.write(f"{completion}|{os.getpid()}\n")
        file.seek(0)
        num_calls = sum(line.startswith(f"{completion}|") for line in file)
    _, num_failures, kind = completion.split()
    if num_calls > int(num_failures):
        return 1.0
    if kind == "die":
        os._exit(9)
    if kind == "sleep":
        time.sleep(3600)
    raise {"error": ConnectionError, "timeout": TimeoutError, "invalid": InvalidItem, "abstain": Abstain}[kind](
        f"call {num_calls}"
    )


BATCHES = {
    "one": [1.0],
    "two": [1.0, 0.0],
    "scalar": 1.0,
    "column": np.ones((3, 1)),
    "row": np.array([1.0, 0.0, 0.5]),
    "tuple": (1, True, np.float32(0.5)),
    "mixed": [1.0, None, float("nan")],
    "errors": [Abstain("not mine"), InvalidItem("no gold"), ConnectionError("away")],
    "dict": {"value": 1.0},
    "generator": (x for x in (1.0, 1.0, 1.0)),
}


def batch_returns(completions, *, what: str):
    return BATCHES[what]


def batch_obey(completions, answers):
    """One result an item; tells how many came with it. Some completions spoil the whole call."""
    for completion in completions:
        if completion in ("sleep", "exit 3"):
            obey(completion, "")
        if completion == "raise":
            raise ConnectionError("the whole call")
    return [
        {"value": float(c == a), "measures": {"batch": len(completions)}, "detail": "seen"}
        for c, a in zip(completions, answers, strict=True)
    ]


def batch_everything(completions, prompts, answers, prompt_ids, nums_tokens, *, scale: float = 1.0):
    rows = zip(completions, prompts, answers, prompt_ids, nums_tokens, strict=True)
    return [{"value": scale, "extracted": "|".join(map(str, row)), "measures": {"batch": len(completions)}} for row in rows]


_under_way = []


async def remote(completion):
    """``nap``, ``hang``, ``swallow`` (the cancellation), ``block`` (the loop), or whatever obey does; tells how many were under way."""
    _under_way.append(completion)
    at_once = len(_under_way)
    try:
        word, _, argument = completion.partition(" ")
        if word == "nap":
            await asyncio.sleep(float(argument))
            at_once = max(at_once, len(_under_way))
        elif word == "hang":
            await asyncio.sleep(3600)
        elif word == "swallow":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    continue
        elif word == "block":
            await asyncio.sleep(0.3)
            time.sleep(3600)
        elif completion != "1":
            obey(completion, "")
        return {"value": 1.0, "measures": {"at_once": at_once}, "extracted": str(os.getpid())}
    finally:
        _under_way.remove(completion)


async def remote_batch(completions):
    if "hang" in completions:
        await asyncio.sleep(3600)
    return [{"value": 1.0, "measures": {"batch": len(completions)}} for _ in completions]


def mixed_up(completion, answers):
    return 1.0


def evaluates(completion):
    return {"value": float(eval(completion)), "detail": "evaluated"}


evaluates.executes_answers = True
