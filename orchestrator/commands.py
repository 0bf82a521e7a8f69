"""What each verb of the command line does. A verb takes the checked configuration and returns the exit code."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ray.exceptions import RayError

from configs.compose import dump_config
from configs.schema import Config
from learner.warm_start import base_model_path
from orchestrator import cluster
from orchestrator.checkpoint import find_checkpoint
from orchestrator.console import printable
from orchestrator.departure import EXIT_STOPPED, Departure
from orchestrator.errors import RunStopped
from orchestrator.grace import leave, leave_after
from orchestrator.job import Job
from orchestrator.material import Material, gather_material, prompts_line, quiet_libraries
from orchestrator.recovery import Lives, detail_of
from orchestrator.run_folder import forget_empty, locked, make_run_folder, write_whole
from orchestrator.waits import DeadlinePassed

SIGNALLED = 128  # and the number of the signal: the exit code, as a shell has it
LEAVE_S = 120.0  # for files and the Ray instance to be closed, beside the actors
MOST_LINES = 5  # of a library's message that is shown as the reason


def build_model(config: Config) -> int:
    """Builds the base model, or finds it in the cache, and prints its folder."""
    quiet_libraries()
    started = time.monotonic()
    folder = base_model_path(config.model, progress=print)
    print(f"model folder: {folder} ({time.monotonic() - started:.1f} s)")
    return 0


def train(config: Config) -> int:
    """Trains; with ``resume`` goes on where the last whole checkpoint stands."""
    for name in heard() - {signal.SIGINT}:
        signal.signal(name, lambda number, _: sys.exit(SIGNALLED + number))  # until the loop has its own way
    try:
        return _train_in_folder(config)
    except OSError as error:  # a full disk, a folder that may not be written into
        raise RunStopped(one_line(error)) from error


def _train_in_folder(config: Config) -> int:
    resumed = find_checkpoint(Path(config.resume), print) if config.resume else None
    folder = Path(config.resume) if config.resume else make_run_folder(config.run_dir, "train")
    with locked(folder):
        try:
            stuff = gather_material(config, print)
        except BaseException:
            forget_empty(folder)
            raise
        write_whole(folder / "config.yaml", dump_config(config, redact=True))
        print(f"run folder: {folder}", flush=True)
        # Where a node has gone, with ranks, another may be on its way; that a run finds no place at first is its user's to know at once
        again = functools.partial(Job, config, folder, stuff, places_s=config.deadlines.start_s)
        lives = Lives(Job(config, folder, stuff, resumed), again)
        try:
            ray_cluster = cluster.start_cluster(config.cluster, cluster.Demand.of(config, gpu=stuff.num_gpus > 0))
            with Departure() as departure:
                try:
                    return asyncio.run(_train(lives, stuff, ray_cluster, departure))
                finally:
                    for number in heard():  # it is ending; cut short, Ray would leave processes behind
                        signal.signal(number, signal.SIG_IGN)
                    ray_cluster.close()
        finally:
            lives.job.view.close()


async def _train(lives: Lives, stuff: Material, ray_cluster: cluster.Cluster, departure: Departure) -> int:
    config, folder = lives.job.config, lives.job.folder
    lives.line(f"model: {stuff.model_path}, {stuff.num_parameters:,} parameters; Ray: {ray_cluster}")
    lives.line(prompts_line(stuff.prompts, lives.job.length))
    interrupt = Interrupt(lives.stop, lives.line, grace_s=config.deadlines.grace_s, stands=lives.what_stands)
    reason, failed = "failed", EXIT_STOPPED
    try:
        reason = await lives.run()
        failed = 0
    except asyncio.CancelledError:
        if interrupt.exit_code == 0:
            raise
        reason = "stopped"
    except (DeadlinePassed, RayError, OSError, RunStopped) as error:
        reason = str(error) if isinstance(error, RunStopped) else one_line(error)
        lives.event("stopped", reason=reason, detail=detail_of(error))
        if isinstance(error, RunStopped):
            raise
        raise RunStopped(f"{reason}; events.jsonl in {folder} has the traceback") from error
    finally:
        interrupt.end_has_begun()
        departure.begin(LEAVE_S + 2 * config.deadlines.close_s, interrupt.exit_code or failed, reason)
        await lives.end(reason)
    if lives.unwritten:
        raise RunStopped(f"the run has ended ({reason}), but could not write {'; '.join(lives.unwritten)}")
    if interrupt.exit_code:
        lives.line(f"{reason}: {lives.what_stands()}")
    return interrupt.exit_code


def heard() -> set[signal.Signals]:
    """The signals by which a run is asked to end. That of a terminal which is gone is none where somebody has it ignored, as nohup does."""
    hangup: set[signal.Signals] = set() if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else {signal.SIGHUP}
    return {signal.SIGINT, signal.SIGTERM} | hangup


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP: the first lets the run end on whole steps and save, within the grace period where there is one; a second one,
    unless either is SIGHUP, ends the process at once, and what it has started."""

    def __init__(
        self,
        stop: Callable[[], bool],
        say: Callable[[str], None],
        *,
        grace_s: float | None = None,
        stands: Callable[[], str] = lambda: "",
    ) -> None:
        """``stop`` asks the work to end and says whether it will; where it will not, the calling task is cancelled. ``stands`` says what is
        left of it where the grace period ends first."""
        self.exit_code = 0
        self._stop = stop
        self._say = say
        self._grace_s, self._stands = grace_s, stands
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in heard():
            loop.add_signal_handler(number, self._take, number)

    def end_has_begun(self) -> None:
        """The work is over and the actors are being ended: a signal sets the exit code and stops nothing more."""
        self._task = None

    def _take(self, number: int) -> None:
        ending, hangup = self.exit_code, SIGNALLED + signal.SIGHUP
        if ending and number == signal.SIGHUP:
            return  # kernel, shell and session manager may each tell of one terminal, and none of them in haste
        if ending not in (0, hangup):
            leave(ending)
        self.exit_code = SIGNALLED + number
        if ending:
            return
        name = signal.Signals(number).name
        if self._grace_s is not None:
            words = f"{name}: deadlines.grace_s={self._grace_s:g} have passed"
            leave_after(self._grace_s, self.exit_code, lambda: f"{words}; {self._stands()}")
        if self._task is not None and self._stop():
            self._say(f"{name}: ending after the step in hand and saving it; once more to stop at once")
            return
        if self._task is not None:
            self._task.cancel()
        self._say(f"{name}: ending; once more to stop at once")


def one_line(error: BaseException) -> str:
    """An error in one line, without the remote traceback that Ray wraps round it."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = " ".join(lines) if len(lines) <= MOST_LINES else " ".join([lines[0], "...", *lines[-MOST_LINES:]])
    return printable(text if isinstance(cause, DeadlinePassed) else f"{type(cause).__name__}: {text}", limit=1000)
