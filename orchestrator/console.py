"""What a person sees while a run goes on: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from configs.schema import Console

if TYPE_CHECKING:  # it brings Ray, which `limen score` prints without
    from orchestrator.evaluation import Evaluation


class View(Protocol):
    def line(self, text: str) -> None:
        """A sentence that stays on the screen."""

    def stage(self, name: str) -> None:
        """What the run is doing now."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""

    def close(self) -> None:
        """Gives the terminal back."""


def make_view(kind: Console, num_steps: int) -> View:
    """``auto`` is live on a terminal and plain elsewhere."""
    if kind is Console.live or (kind is Console.auto and sys.stdout.isatty()):
        return LiveView(num_steps)
    return PlainView(num_steps, quiet=kind is Console.off)


class PlainView:
    """One line a step, at most one a second, and always the last one."""

    def __init__(self, num_steps: int, *, quiet: bool) -> None:
        self._num_steps = num_steps
        self._quiet = quiet
        self._clock = Clock(num_steps)
        self._printed = 0.0

    def line(self, text: str) -> None:
        if not self._quiet and takes(sys.stdout):
            with contextlib.suppress(OSError):  # a full disk under a log, a terminal that is gone: the run goes on all the same
                print(printable(text), flush=True)

    def stage(self, name: str) -> None:
        """Plain lines tell of steps only."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._clock.tick(step)
        if time.monotonic() - self._printed < 1.0 and step != self._num_steps:
            return
        self._printed = time.monotonic()
        self.line(f"step {step}/{self._num_steps}  " + "  ".join(f"{k} {v}" for k, v in headline(metrics)) + f"  {self._clock}")

    def close(self) -> None:
        """Nothing is held."""


class LiveView:
    """The stages of this step, the headline numbers, pass rate by stratum, time left."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._clock = Clock(num_steps)
        self._stage, self._since = "starting", time.monotonic()
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._terminal = Terminal()
        self._live = Live(get_renderable=self._render, console=self._terminal, refresh_per_second=4, transient=True)
        self._live.start()

    def line(self, text: str) -> None:
        if takes(sys.stdout):
            with contextlib.suppress(OSError):  # as for plain lines
                self._terminal.print(Text(printable(text)))

    def stage(self, name: str) -> None:
        self._stage, self._since = name, time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, metrics
        self._clock.tick(step)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"step {self._step}/{self._num_steps}",
            ProgressBar(total=max(1, self._num_steps), completed=self._step, width=40),
            str(self._clock),
            Text(f"{self._stage} {time.monotonic() - self._since:.1f} s", style="cyan"),
        )
        numbers = Table.grid(padding=(0, 2))
        for name, text in headline(self._metrics):
            numbers.add_row(name, Text(text, style="bold"))
        strata = Table.grid(padding=(0, 2))
        for name, rate in self._metrics.items():
            if name.startswith("pass_rate/"):
                strata.add_row(
                    Text(name.removeprefix("pass_rate/")), ProgressBar(total=1.0, completed=rate, width=24), f"{rate:.2f}"
                )
        stages = Table.grid(padding=(0, 2))
        for name in ("generate", "prepare", "train", "push"):
            if f"time/{name}_s" in self._metrics:
                stages.add_row(name, f"{self._metrics[f'time/{name}_s']:.2f} s")
        body = Table.grid(padding=(0, 4))
        body.add_row(numbers, strata, stages)
        return Group(head, body)


class Clock:
    """Time left, from the pace of the steps done since this process started."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] = (0, 0.0)

    def tick(self, step: int) -> None:
        self._last = (step, time.monotonic())
        self._first = self._first or self._last

    def __str__(self) -> str:
        if self._first is None or self._last[0] == self._first[0]:
            return "time left: unknown"
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        minutes, seconds = divmod(round(pace * (self._num_steps - self._last[0])), 60)
        return f"time left: {minutes} min {seconds:02d} s"


def headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers that tell whether a run is well, as name and text."""
    rows = []
    for name, label, form in (
        ("reward/mean", "reward", "{:.3f}"),
        ("group/pass_rate", "pass rate", "{:.3f}"),
        ("policy/entropy", "entropy", "{:.3f}"),
        ("update/grad_norm", "grad norm", "{:.3f}"),
        ("eff/prompt_frac", "groups with signal", "{:.2f}"),
        ("time/tokens_per_s", "tokens/s", "{:,.0f}"),
        ("time/step_s", "step", "{:.2f} s"),
    ):
        if name in metrics:
            rows.append((label, form.format(metrics[name])))
    return rows


def evaluation_lines(title: str, before: Evaluation | None, after: Evaluation) -> list[str]:
    """The held-out pass rate, all and by stratum, with what it was before where that is known."""

    def change(old: float | None, new: float) -> str:
        return f"{new:.3f}" if old is None else f"{old:.3f} -> {new:.3f} ({new - old:+.3f})"

    ks = ", ".join(f"pass@{k} {change(before.pass_at.get(k) if before else None, v)}" for k, v in after.pass_at.items())
    lines = [f"{title}: {ks} on {after.num_prompts} held-out prompts"]
    for stratum, rate in after.pass_at_1_by_stratum.items():
        lines.append(f"  {stratum}: pass@1 {change(before.pass_at_1_by_stratum.get(stratum) if before else None, rate)}")
    if after.num_failed:
        lines.append(f"  {after.num_failed} completions could not be judged and count nowhere")
    return lines


def to_stderr(text: str, *, waits: bool = False) -> None:
    """A line of Limen's own. Where stderr goes may be full or gone: that keeps nobody from what comes next; held, only what ``waits``."""
    if waits or takes(sys.stderr):
        with contextlib.suppress(OSError):
            print("limen: " + printable(text), file=sys.stderr, flush=True)


def takes(stream: TextIO) -> bool:
    """Whether a line goes out at once. A terminal that is held (Ctrl-S) or a pipe that nobody reads takes none for as long as that lasts,
    and everything the driver does would wait with it."""
    try:
        ready = select.poll()
        ready.register(stream, select.POLLOUT)
        return bool(ready.poll(0))
    except (OSError, ValueError, TypeError):  # it has no descriptor, or is closed: whoever writes to it will see
        return True


def printable(text: str, limit: int = 2000) -> str:
    """Text that is safe on a terminal: control characters and lone surrogates escaped, cut to ``limit`` characters."""
    cut = text if len(text) <= limit else text[:limit] + f" ... ({len(text) - limit} more characters)"
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
