"""A user's file of verifiers, most of which misbehave when the completion tells them to. Loaded by path in the pool's processes."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

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


ACTS = {
    "sleep": _sleep,
    "nap": _nap,
    "hold_interpreter": _hold_interpreter,
    "ignore_signals": _ignore_signals,
    "family": _family,
    "fork_and_return": _fork_and_return,
    "fork_and_die": _fork_and_die,
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
