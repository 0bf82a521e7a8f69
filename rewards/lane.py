"""The processes that some reward parts share, or that one part has to itself, and the calls that wait for them.

A thread a process starts it, feeds it, keeps its deadlines and replaces it. What was sent to a process and not begun goes back to
the head of the queue when the process is lost, and also when one call holds it up: nothing waits behind a stuck item while another
process is idle. A verdict counts once, whoever comes first.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards.contract import RewardError, describe, failed
from rewards.process import START_S, STOPPED_S, GarbledError, StoppedError, Woken, WorkerProcess
from rewards.worker import Setup, read_score
from rollout.records import Score, Status

MAX_CALLS = 64  # sent to a process at once
CHUNK_S = 0.01  # a process is sent about as many calls as it answers in this
STUCK_S = 0.2  # a call that runs longer holds up those sent with it: they go to another process
GRACE_S = 2.0  # beyond its deadline, for an async call to be cancelled in its process
KILLED, STOPPED = f"was killed by {signal.Signals.SIGKILL.name}", "was stopped and then killed by the pool"
CPU_LIMIT = f"was killed by {signal.Signals.SIGXCPU.name}"
MAX_TRIES = 3  # processes that may end before an item is begun until that item is given up; starts in place of one that was lost
RESTART_S = 1.0  # before the second of these, and twice that before the third


@dataclass(eq=False, slots=True)
class Task:
    """One part of one item."""

    part: str
    order: int  # of the queue
    data: bytes  # the pickled item
    options: bytes  # the pickled options for this part
    settle: Callable[[Task, Score], None]  # takes the verdict of a call, from any thread; perhaps of more than one
    done: bool = False  # set by who settles it: no process need judge it any more
    alone: bool = False  # judged in a call of its own
    exclusive: bool = False  # and with no other call under way in the process
    num_unlucky: int = 0  # processes that ended before they began it


@dataclass(eq=False, slots=True)
class Call:
    """One call of a verifier, sent to a process."""

    part: str
    tasks: Sequence[Task]
    begun: float = 0.0
    recalled: bool = False  # its tasks are in the queue again


@dataclass(eq=False, slots=True)
class Seat:
    """The place of one process, through all its replacements."""

    news: tuple[socket.socket, socket.socket]  # what is sent from the second ends a wait at the first
    process: WorkerProcess | None = None
    failure: str | None = None  # why the last start failed
    tried: threading.Event = field(default_factory=threading.Event)  # the first start has succeeded or failed
    waiting: dict[int, Call] = field(default_factory=dict)  # sent and not begun, by number
    running: dict[int, Call] = field(default_factory=dict)  # begun and not answered
    heard: float = 0.0  # when the process last spoke, or was sent something when it had nothing
    is_silent: bool = True  # since then
    stopped: float | None = None  # since when it was seen so
    is_full: bool = False  # it asked to be replaced
    pace_s: float = CHUNK_S  # of one call, a running mean
    num_sent: int = 0  # items, to this process
    num_calls: int = 0
    num_lost: int = 0
    num_recycled: int = 0

    def calls(self) -> list[Call]:
        return [*self.running.values(), *self.waiting.values()]


class Lane:
    """``num_processes`` processes with the verifiers of ``setup``.

    ``changed`` guards the queue and is shared by all lanes of a pool. ``fail`` is told of a fault of the lane's own, which must leave
    nobody waiting.
    """

    def __init__(
        self,
        setup: Setup,
        num_processes: int,
        items_per_process: int | None,
        changed: threading.Condition,
        fail: Callable[[str], None],
    ) -> None:
        self._setup, self._items_per_process, self._fail = setup, items_per_process, fail
        self._concurrency = max(part.concurrency for part in setup.parts.values())
        self._changed = changed
        self._queues: dict[str, deque[Task]] = {name: deque() for name in setup.parts}
        self._ended = False
        self.seats = [Seat(news=_pair()) for _ in range(num_processes)]
        self._threads = [threading.Thread(target=self._keep, args=(s,), name="reward-pool", daemon=True) for s in self.seats]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, tasks: Sequence[Task], *, first: bool = False) -> None:
        """Queue tasks, behind the others or before them."""
        with self._changed:
            for task in reversed(tasks) if first else tasks:
                queue = self._queues[task.part]
                (queue.appendleft if first else queue.append)(task)
            self._changed.notify_all()
        if self._concurrency > 1:
            self._tell()

    def num_queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def end(self) -> None:
        """Have all processes killed; `join` waits for it."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._tell()

    def join(self) -> None:
        for thread, seat in zip(self._threads, self.seats, strict=True):
            thread.join()
            for end in seat.news:
                end.close()

    def _tell(self) -> None:
        for seat in self.seats:
            with contextlib.suppress(OSError):  # full, so that it will be read; or closed
                seat.news[1].send(b"!")

    # ---- a seat's thread ----

    def _keep(self, seat: Seat) -> None:
        try:
            self._start(seat)
            while calls := self._take(seat, wait=True):
                process = seat.process or self._start(seat)
                if process is None:
                    for call in calls:
                        self._settle(call, Status.ERROR, str(seat.failure), 0.0)
                    continue
                self._serve(seat, process, calls)
                if seat.process is not None and (seat.is_full or self._room(seat) == 0):
                    process.kill()
                    seat.process, seat.num_recycled = None, seat.num_recycled + 1
                if seat.process is None:
                    self._start(seat)
        except Woken:
            pass
        except BaseException as error:
            self._fail(f"the reward pool failed: {describe(error)}")
            raise
        finally:
            if seat.process is not None:
                seat.process.kill()
            seat.tried.set()

    def _start(self, seat: Seat) -> WorkerProcess | None:
        seat.num_sent, seat.is_full = 0, False
        # What has worked once may work again: memory, processes or files may be short for a moment.
        for num_tries in range(MAX_TRIES if seat.tried.is_set() else 1):
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, num_tries * RESTART_S):
                    raise Woken
            try:
                seat.process = WorkerProcess(self._setup, seat.news[0].fileno(), lambda: self._ended)
                break
            except RewardError as error:
                seat.failure = str(error)
            except OSError as error:
                seat.failure = f"a verifier process can not be started: {error}"
        seat.tried.set()
        return seat.process

    def _serve(self, seat: Seat, process: WorkerProcess, calls: list[Call]) -> None:
        """Have calls judged, and more as places get free; back when the process has answered all or is lost."""
        try:
            while calls or seat.running or seat.waiting:
                if calls:
                    self._send(seat, process, calls)
                for kind, *message in process.receive(self._next_look(seat, process)):
                    self._hear(seat, kind, message)
                self._look(seat, process)
                calls = self._take(seat, wait=False)
        except TimeoutError:
            process.kill()
            self._lose(seat, None)
        except StoppedError:
            process.kill()
            self._lose(seat, STOPPED)
        except (EOFError, OSError):
            self._lose(seat, process.kill(grace_s=1.0))
        except GarbledError:
            process.kill()
            self._lose(seat, "wrote into the pool's connection and was killed")

    def _send(self, seat: Seat, process: WorkerProcess, calls: Sequence[Call]) -> None:
        if not seat.calls():
            seat.heard, seat.is_silent = time.monotonic(), True
        message = []
        for call in calls:
            seat.num_calls += 1
            seat.waiting[seat.num_calls] = call
            message.append((seat.num_calls, call.part, call.tasks[0].options, [task.data for task in call.tasks]))
        process.send(message)

    def _hear(self, seat: Seat, kind: str, message: Sequence[Any]) -> None:
        seat.heard, seat.is_silent = time.monotonic(), False
        if kind == "full":
            seat.is_full = True
            return
        try:
            number, *rest = message
            if kind == "begin":
                call = seat.running[number] = seat.waiting.pop(number)
                call.begun = seat.heard
                return
            late, values = rest
            scores = [read_score(value) for value in values]
            call = seat.running.pop(number)
            if len(scores) != len(call.tasks):
                raise ValueError(f"{len(scores)} scores for {len(call.tasks)} items")
        except (KeyError, TypeError, ValueError) as error:
            raise GarbledError from error
        seat.pace_s = 0.9 * seat.pace_s + 0.1 * (seat.heard - call.begun)
        if late and len(call.tasks) > 1:
            self._retry_alone(call, exclusive=False)
            return
        for task, score in zip(call.tasks, scores, strict=True):
            task.settle(task, score)

    def _next_look(self, seat: Seat, process: WorkerProcess) -> float:
        """When something must be done if the process says nothing."""
        soon = time.monotonic() + STOPPED_S / 2
        if not seat.running:
            return min(seat.heard + START_S, soon)
        limit = min(soon, *(call.begun + self._limit_s(process, call) for call in seat.running.values()))
        return min(limit, seat.heard + STUCK_S) if self._can_recall(seat) else limit

    def _look(self, seat: Seat, process: WorkerProcess) -> None:
        """Raises TimeoutError when a deadline has passed, StoppedError for a process that is no longer at work."""
        now = time.monotonic()
        seat.stopped = (seat.stopped or now) if process.is_stopped() else None
        if seat.stopped is not None and now >= seat.stopped + STOPPED_S:
            raise StoppedError
        if any(now >= call.begun + self._limit_s(process, call) for call in seat.running.values()):
            raise TimeoutError
        if not seat.running and seat.waiting and now >= seat.heard + START_S:
            raise TimeoutError
        if self._can_recall(seat) and now >= seat.heard + STUCK_S:
            held_up = list(seat.waiting.values())
            for call in held_up:
                call.recalled = True
            self.put([task for call in held_up for task in call.tasks], first=True)

    def _limit_s(self, process: WorkerProcess, call: Call) -> float:
        return self._setup.timeout_s[call.part] + (GRACE_S if call.part in process.async_parts else 0.0)

    def _can_recall(self, seat: Seat) -> bool:
        others = len(self.seats) > 1 and self._concurrency == 1
        return others and bool(seat.running) and any(not call.recalled for call in seat.waiting.values())

    def _lose(self, seat: Seat, how: str | None) -> None:
        """The process is gone: settle what it is to blame for, queue the rest again. ``how`` it ended, None at a deadline."""
        now, running, waiting = time.monotonic(), list(seat.running.values()), list(seat.waiting.values())
        seat.process, seat.stopped, seat.num_lost = None, None, seat.num_lost + 1
        seat.running.clear()
        seat.waiting.clear()
        unlucky = not running and seat.is_silent
        back: list[Call] = []
        for call in running:
            timeout_s, function = self._setup.timeout_s[call.part], self._setup.parts[call.part].function
            if call.recalled:
                continue
            if how is None and now < call.begun + timeout_s:
                back.append(call)
            elif len(call.tasks) > 1 or (len(running) > 1 and not (how is None and seat.heard > call.begun + timeout_s)):
                # One of many is to blame; but where the process still spoke after its deadline, it is the call that would not end.
                self._retry_alone(call, exclusive=True)
            elif how in (KILLED, STOPPED) and not call.tasks[0].alone:  # by somebody else, as likely as by what it judged
                self._retry_alone(call, exclusive=True)
            elif how is None:
                detail = f"{function}: was still running after {timeout_s:g} s and was killed"
                self._settle(call, Status.TIMEOUT, detail, now - call.begun)
            elif how == CPU_LIMIT:
                detail = f"{function}: its process {how}: it used more CPU time than one core has in {timeout_s:g} s"
                self._settle(call, Status.TIMEOUT, detail, now - call.begun)
            else:
                self._settle(call, Status.ERROR, f"{function}: its process {how}", now - call.begun)
        for call in waiting:
            if not call.recalled:
                back.append(call)
        tasks = [task for call in back for task in call.tasks]
        if unlucky:
            tasks = [task for task in tasks if not self._gives_up(task, how or "did not begin and was killed")]
        self.put(tasks, first=True)

    def _gives_up(self, task: Task, how: str) -> bool:
        """Whether processes have ended too often before they began it."""
        task.num_unlucky += 1
        if task.num_unlucky < MAX_TRIES:
            return False
        detail = f"given up after {MAX_TRIES} verifier processes ended before they began it; the last: its process {how}"
        task.settle(task, failed(Status.ERROR, detail, 0.0))
        return True

    def _retry_alone(self, call: Call, *, exclusive: bool) -> None:
        """One item may have spoiled it for the others: each gets a call to itself."""
        if not call.recalled:
            for task in call.tasks:
                task.alone, task.exclusive = True, task.exclusive or exclusive
            self.put(call.tasks, first=True)

    def _settle(self, call: Call, status: Status, detail: str, time_s: float) -> None:
        for task in call.tasks:
            task.settle(task, failed(status, detail, time_s / len(call.tasks)))

    # ---- the queue ----

    def _room(self, seat: Seat) -> float:
        """Items that its process may still be sent."""
        return math.inf if self._items_per_process is None else max(0, self._items_per_process - seat.num_sent)

    def _take(self, seat: Seat, *, wait: bool) -> list[Call]:
        """The next calls for a process; none when the lane has ended, or without ``wait`` when none is due."""
        with self._changed:
            while not self._ended:
                calls = list(self._due(seat))
                if calls or not wait:
                    return calls
                self._changed.wait()
            return []

    def _due(self, seat: Seat) -> Iterator[Call]:
        under_way = seat.calls()
        if self._concurrency > 1:
            num_free = self._concurrency - len(under_way)
        else:  # ever fewer towards the end of the queue, so that all processes finish at about the same time
            in_time = max(1, min(MAX_CALLS, int(CHUNK_S / max(seat.pace_s, 1e-6))))
            num_free = 0 if under_way else min(in_time, 1 + self.num_queued() // (2 * len(self.seats)))
        while num_free > 0 and not seat.is_full and (queue := self._next_queue()) is not None:
            room = self._room(seat)
            if room == 0 or (under_way and (under_way[0].tasks[0].exclusive or queue[0].exclusive)):
                return
            part, num_seats = queue[0].part, len(self.seats)
            is_batch = seat.process is not None and part in seat.process.batch_parts and not queue[0].alone
            size = min(self._setup.parts[part].batch_size, room, math.ceil(len(queue) / num_seats)) if is_batch else 1
            tasks = [queue.popleft()]
            while len(tasks) < size and queue and queue[0].options == tasks[0].options and not queue[0].alone:
                tasks.append(queue.popleft())
            seat.num_sent += len(tasks)
            num_free -= 1
            under_way.append(Call(part, tasks))
            yield under_way[-1]

    def _next_queue(self) -> deque[Task] | None:
        """Whose head has waited longest."""
        for queue in self._queues.values():
            while queue and queue[0].done:
                queue.popleft()
        return min((queue for queue in self._queues.values() if queue), key=lambda queue: queue[0].order, default=None)


def _pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends
