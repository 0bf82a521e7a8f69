"""How a process lets others see what it is doing: at ``SIGNAL`` it writes the stacks of all its threads into a file in memory.

The writing is done by the standard library's ``faulthandler``, in the signal handler itself: it needs no lock of the interpreter, so a
process that hangs in C code answers as well. The file has no name on any disk, nothing of it is left behind, and others of the same
user open it as ``/proc/PID/fd/N``. Whoever has no such file does not listen and must not be sent the signal, which would end it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import os
import signal
import sys

FILE_NAME = "limen-stacks"


def stack_signal() -> int:
    """A real-time signal: torch, Ray, vLLM, DeepSpeed and aiohttp know of SIGUSR1 and SIGUSR2 at most."""
    return int(signal.SIGRTMIN) + 11


@functools.cache
def listen() -> None:
    """Makes this process answer from now on; nothing happens a second time, nor off Linux, where there is no /proc to read it from."""
    if sys.platform != "linux":
        return
    file = os.memfd_create(FILE_NAME)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that a reader may empty it
    faulthandler.register(stack_signal(), file=file, all_threads=True)
