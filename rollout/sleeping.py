"""Whether an engine has its memory and its weights: the order of sleep, wake and swap, the same for every form of engine."""

from __future__ import annotations

from rollout.engine import Wake


class SleepState:
    """Every method raises ValueError, naming the engine and what must come first, where its step is not the next one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asleep: frozenset[Wake] = frozenset()
        self._empty = False  # the weights' memory holds nothing since it slept

    def may_sleep(self, num_open: int) -> None:
        if self._asleep:
            raise ValueError(f"engine {self._name} sleeps already")
        if num_open:
            raise ValueError(f"engine {self._name} has {num_open} completions to make and cannot sleep: cancel them first")

    def slept(self) -> None:
        self._asleep, self._empty = frozenset(Wake), True

    def may_wake(self, what: Wake) -> None:
        if what not in self._asleep:
            raise ValueError(f"engine {self._name}: its {what} are not asleep")
        if what is Wake.CACHE and Wake.WEIGHTS in self._asleep:
            raise ValueError(f"engine {self._name}: its weights wake before its cache")

    def woke(self, what: Wake) -> None:
        self._asleep -= {what}

    def may_swap(self) -> None:
        if Wake.WEIGHTS in self._asleep:
            raise ValueError(f"engine {self._name} sleeps and has no room for weights: wake them first")

    def swapped(self) -> None:
        self._empty = False

    def may_compute(self) -> None:
        if self._asleep:
            raise ValueError(f"engine {self._name} cannot compute: asleep are its {' and '.join(sorted(self._asleep))}")
        if self._empty:
            raise ValueError(f"engine {self._name} cannot compute: it slept, and no push has filled its weights since")
