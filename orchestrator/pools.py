"""The reward pools as one, as the loop drives them over Ray, and the watch over them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError

from configs.schema import DeadlinesConfig
from orchestrator.actors import PULSE, PoolPulse
from orchestrator.errors import RunStopped
from orchestrator.fleet import words
from orchestrator.handles import MOST_REPLACEMENTS
from orchestrator.lost import is_lost
from orchestrator.stages import Finished, Scored
from orchestrator.waits import DeadlinePassed, Wait, Waits
from rollout.records import Consequence, Prompt, Score, Visit


class RayScorer:
    """Scores parcels on the node that holds them."""

    def __init__(
        self,
        pools: Mapping[str, Any],
        node_of: Callable[[str], str],
        prompts: Mapping[str, Prompt],
        replace: Callable[[str, str], Awaitable[tuple[str, Any] | None]],
        tell: Callable[[Sequence[Scored]], None] = lambda scored: None,
    ) -> None:
        """``pools`` are the reward actors by node, ``node_of`` tells the node of a worker by its name. ``replace`` ends a node's pool, told
        why, and makes another: the node it is on, and its actor; None where its node is gone and other pools go on. ``tell`` gets the
        scores as they come in, also those whose policy ends the run."""
        self.pools = dict(pools)
        self._node_of = node_of
        self._prompts = prompts
        self._replace = replace
        self._tell = tell
        self._replacing = asyncio.Lock()
        self._num_lost: dict[str, int] = {}
        self.num_asked = 0  # parcels that wait for their scores

    @property
    def num_lost(self) -> int:
        """Verifier processes that were killed or died, in the pools as they are now."""
        return sum(self._num_lost.values())

    def _node(self, worker: str) -> str:
        """The worker's. One on a node without a pool sends its text to another."""
        node = self._node_of(worker)
        return node if node in self.pools else next(iter(self.pools))

    async def score(self, finished: Sequence[Finished]) -> list[Scored]:
        parcels: dict[Any, list[Finished]] = defaultdict(list)
        for item in finished:
            parcels[item.address.parcel].append(item)
        scored = await asyncio.gather(*(self._score_parcel(parcel, items) for parcel, items in parcels.items()))
        by_visit = {item.meta.visit: item for items in scored for item in items}
        return [by_visit[item.meta.visit] for item in finished if item.meta.visit in by_visit]

    async def _score_parcel(self, parcel: Any, items: Sequence[Finished]) -> list[Scored]:
        questions = []
        for item in items:
            prompt = self._prompts[item.meta.visit.prompt_id]
            questions.append((item.address.place, prompt.text, prompt.answer, prompt.reward, prompt.source))
        self.num_asked += 1
        try:
            scores = await self._ask(items[0].meta.worker, parcel, questions)
        except RayError as error:
            if not is_lost(error):
                raise
            return []
        finally:
            self.num_asked -= 1
        scored = [Scored(item.meta, item.address, of_group) for item, of_group in zip(items, scores, strict=True)]
        self._tell(scored)
        for group in scored:
            _stop_where_told(group.meta.visit, group.scores)
        return scored

    async def _ask(self, worker: str, parcel: Any, questions: Sequence[Any]) -> list[tuple[Score, ...]]:
        """A pool's actor that is lost is replaced and asked again, as often as a worker is."""
        num_gone = 0  # pools; those that are counted below are verifier processes
        while True:
            node = self._node(worker)
            pool = self.pools[node]
            try:
                scores, self._num_lost[node] = await pool.score.remote(parcel, questions)
            except RayError as error:
                if not _is_gone(error):
                    raise
                num_gone += 1
                if num_gone > MOST_REPLACEMENTS:
                    raise RunStopped(
                        f"the reward pool of node {node} was lost {num_gone} times over the same groups: {words(error)}"
                    ) from error
                await self.renew(node, pool, words(error))
            else:
                return cast(list[tuple[Score, ...]], scores)

    async def renew(self, node: str, pool: Any, reason: str) -> None:
        """Has the pool ended and replaced, once, however many find it lost."""
        async with self._replacing:
            if self.pools.get(node) is not pool:
                return
            successor = await self._replace(node, reason)
            del self.pools[node]
            self._num_lost.pop(node, None)
            if successor is not None:
                self.pools[successor[0]] = successor[1]


class PoolWatch:
    """Replaces pools that do not answer, and those that have groups to score and end no call of a verifier for longer than any may take:
    of a process that is deadlocked nobody else would tell."""

    def __init__(
        self, scorer: RayScorer, waits: Waits, deadlines: DeadlinesConfig, still_s: float, event: Callable[..., None]
    ) -> None:
        """``still_s``: a pool that works may take so long between the ends of two calls."""
        self._scorer, self._waits, self._deadlines = scorer, waits, deadlines
        self._still_s, self._event = still_s, event
        self._progress: dict[str, _Progress] = {}  # by node, of pools that have answered

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(self._deadlines.heartbeat_s, self._still_s) / 4)
            await asyncio.gather(*(self._feel_pulse(node, pool) for node, pool in list(self._scorer.pools.items())))

    async def _feel_pulse(self, node: str, pool: Any) -> None:
        before = self._progress.get(node)
        if before is not None and before.pool is not pool:
            before = None
        limit_s = self._deadlines.heartbeat_s if before else self._deadlines.start_s  # a new one loads its verifiers first
        asked = pool.health.options(concurrency_group=PULSE).remote()
        try:
            pulse: PoolPulse = await self._waits.wait(asked, owner="reward pool", name="a sign of life", deadline_s=limit_s)
        except (RayError, DeadlinePassed) as error:
            await self._scorer.renew(node, pool, words(error))
            return
        if num_lost := pulse.num_lost - (before.pulse.num_lost if before else 0):
            self._event("verifiers_lost", node=node, num_processes=num_lost)
        now = time.monotonic()
        if before is None or pulse.num_open == 0 or pulse.num_ended != before.pulse.num_ended:
            self._progress[node] = _Progress(pool, pulse, now)
        elif now - before.since > self._still_s:
            name = "a call of a verifier to end"
            stuck = Wait(owner="reward pool", name=name, deadline_s=self._still_s, since=before.since)
            await self._scorer.renew(node, pool, str(await self._waits.passed(stuck)))


@dataclass(frozen=True, slots=True)
class _Progress:
    pool: Any
    pulse: PoolPulse
    since: float  # of this state of affairs; time.monotonic()


def _is_gone(error: RayError) -> bool:
    """The actor, not what it was asked."""
    return not isinstance(error, RayTaskError) and not is_lost(error)


def _stop_where_told(visit: Visit, scores: Sequence[Score]) -> None:
    for score in scores:
        if score.consequence is Consequence.FAIL:
            raise RunStopped(f"a verifier gave no verdict, and its policy is `fail`: prompt {visit.prompt_id!r}: {score.detail}")
