"""``limen ledger RUN``: what became of every prompt visit of a run, from its newest checkpoint, metrics.jsonl and events.jsonl.

The checkpoint knows every visit and prompt as of its step; the rows of later steps say how many more were trained and dropped. Rows that
a return to a checkpoint made void count as discarded. It reads alone, so the run may be going on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import ConfigError
from orchestrator.checkpoint import newest_checkpoint
from orchestrator.console import printable
from orchestrator.ledger import Entry, State, read_entry
from orchestrator.pass_rates import BANDS, PassRates, bands

MOST_STUCK = 20  # visits that are listed

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Saved:
    """What the newest checkpoint holds."""

    step: int
    version: int
    ledger: Mapping[str, Any]  # as of Ledger.state
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class History:
    """The rows of metrics.jsonl, by whether the present weights stand on them."""

    standing: tuple[Row, ...]
    discarded: tuple[Row, ...]


def ledger(run: Path) -> int:
    """Prints the ledger and returns 0. Raises ConfigError for a folder that is no run's."""
    print("\n".join(printable(line, limit=1000) for line in report(run)))
    return 0


def report(run: Path) -> list[str]:
    """The lines that are printed."""
    events, rows = (list(read_rows(run / f"{name}.jsonl")) for name in ("events", "metrics"))
    if not (run / "config.yaml").is_file() and not events:
        raise ConfigError(f"{run}: is not the folder of a run; name one that `limen train` printed as `run folder`")
    saved = _saved(run)
    present = max((event.get("incarnation", 0) for event in events), default=0)
    events = [{**event, "void": event.get("incarnation", 0) < present} for event in events]
    past = history(rows, present, saved.step if saved else 0)
    later = [row for row in past.standing if saved is None or row["step"] > saved.step]
    last = max([row["step"] for row in past.standing] + [saved.step if saved else 0])
    lines = [f"run {run}: step {last}, " + (f"checkpoint of step {saved.step}" if saved else "no checkpoint yet")]
    lines += _visits(saved, later) + _again(saved, events) + _discarded(past, events)
    if saved is None:
        return [*lines, "", "prompts and open visits are known once a checkpoint is written (checkpoint.every)"]
    return lines + _prompts(saved) + _stuck(saved, events)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, none where there is no file; half a line at the end is one that is being written."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def history(rows: Sequence[Row], incarnation: int, saved_step: int) -> History:
    """A row is void where a later one is of the same step or an earlier one: the run had gone back. Where its present ``incarnation`` has
    written none yet, so are those later than its newest checkpoint, of ``saved_step``."""
    standing: list[Row] = []
    discarded: list[Row] = []
    again_from = saved_step + 1 if rows and incarnation > rows[-1]["incarnation"] else math.inf
    for row in reversed(rows):
        if row["step"] < again_from:
            standing.append(row)
            again_from = row["step"]
        else:
            discarded.append(row)
    return History(tuple(standing[::-1]), tuple(discarded[::-1]))


def _saved(run: Path) -> Saved | None:
    try:
        checkpoint = newest_checkpoint(run)
        if checkpoint is None:
            return None
        return Saved(checkpoint.step, checkpoint.state["version"], checkpoint.state["ledger"], checkpoint.ledger_arrays())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: was removed while it was read; ask again") from error


# ---- the sections ---------------------------------------------------------------------------------------------------


def _visits(saved: Saved | None, later: Sequence[Row]) -> list[str]:
    counts = Counter(saved.ledger["counts"] if saved else {})
    for row in later:
        counts["trained"] += int(row["batch/num_groups"])
        counts.update({f"dropped/{name[5:]}": int(n) for name, n in row.items() if name.startswith("drop/")})
    ended = {name: n for name, n in sorted(counts.items()) if name.startswith("dropped/")}
    table = [("trained", counts["trained"], ""), *((f"dropped: {name[8:]}", n, "") for name, n in ended.items())]
    if saved:
        entries = [read_entry(row) for row in saved.ledger["open"]]
        states = Counter(entry.state for entry in entries)
        meaning = {State.KEPT: "its groups are in the checkpoint"}
        table += [(state.value, states[state], meaning.get(state, "asked again on resume")) for state in State if states[state]]
        table.append(("queued again", len(saved.ledger["again"]), "picked before new visits"))
    title = "visits" + (f" (open ones as of step {saved.step})" if saved else "")
    return ["", title, *_align([(name, f"{n:,}", note) for name, n, note in table])]


def _again(saved: Saved | None, events: Sequence[Row]) -> list[str]:
    """Askings that came to nothing: those the checkpoint counts, and losses told of after it, in this incarnation."""
    counts = Counter(
        {name[9:]: n for name, n in (saved.ledger["counts"] if saved else {}).items() if name.startswith("requeued/") and n}
    )
    places = [i for i, event in enumerate(events) if event["event"] == "checkpoint" and saved and event["step"] == saved.step]
    for event in events[places[-1] + 1 if places else 0 :] if places or not saved else []:
        if event["event"] == "visits_lost" and not event["void"]:
            counts[event["reason"]] += event["num_visits"]
    told = ", ".join(f"{reason} {n:,}" for reason, n in sorted(counts.items()) if n)
    return [f"asked again: {told}"] if told else []


def _discarded(past: History, events: Sequence[Row]) -> list[str]:
    lines = []
    if past.discarded:
        trained = sum(int(row["batch/num_groups"]) for row in past.discarded)
        judged = sum(int(row["batch/num_visits"]) for row in past.discarded)
        lines = [
            f"discarded by going back to a checkpoint: {len(past.discarded)} steps, in which {judged:,} visits were judged and "
            f"{trained:,} trained"
        ]
    back = [event for event in events if event["event"] == "rolled_back"]
    causes = Counter(event["cause"] for event in back)
    if back:
        told = ", ".join(f"{cause} ({n})" for cause, n in causes.most_common())
        lines.append(f"went back by itself {len(back)} times: {told}")
    return lines


def _prompts(saved: Saved) -> list[str]:
    """Bands by stratum: prompts that were asked by their posterior, the others by their stratum's prior."""
    names, num_prompts = list(saved.ledger["strata"]), list(saved.ledger["strata"].values())
    arrays = saved.arrays
    rates = PassRates(arrays["stratum"], len(names), saved.ledger["config"]["half_life_versions"])
    everyone = np.arange(len(arrays["stratum"]))
    rates.restore(everyone, arrays, np.arange(len(names)))
    priors = rates.priors(saved.version)
    of_asked, of_others = bands(rates.posteriors(everyone, saved.version)), bands(priors)
    rows: list[tuple[str, ...]] = [("stratum", "prompts", "asked", *BANDS, "expected pass rate of one not asked")]
    total = np.zeros(2 + len(BANDS), dtype=np.int64)
    for number, name in sorted(enumerate(names), key=lambda item: item[1]):
        mine = of_asked[arrays["stratum"] == number]
        by_band = np.bincount(mine, minlength=len(BANDS))
        by_band[of_others[number]] += num_prompts[number] - len(mine)
        figures = np.array([num_prompts[number], len(mine), *by_band])
        total += figures
        mean, strength = priors[number][0] / priors[number].sum(), priors[number].sum()
        rows.append((name, *(f"{n:,}" for n in figures), f"{mean:.3f} (worth {strength:.1f} completions)"))
    rows.append(("all", *(f"{n:,}" for n in total), ""))
    visits = arrays["num_visits"]
    most = f"; {visits.sum():,} visits, at most {visits.max():,} to one prompt" if len(visits) else ""
    return ["", f"prompts by estimated pass rate (below 0.1, between, above 0.9) at version {saved.version}{most}", *_align(rows)]


def _stuck(saved: Saved, events: Sequence[Row]) -> list[str]:
    """Visits open for long: those of the checkpoint, and those told of after it that it holds or that were picked after it."""
    limit, now = saved.ledger["config"]["stuck_after_steps"], saved.ledger["num_steps"]
    entries = {e.pick.order: e for e in map(read_entry, [*saved.ledger["open"], *saved.ledger["again"]])}
    queued = {row[0] for row in saved.ledger["again"]}
    lines = {
        order: _told(e, "queued again" if order in queued else e.state.value, now)
        for order, e in entries.items()
        if now - e.since >= limit
    }
    for event in events:
        known = event["event"] == "visit_stuck" and event["step"] > saved.step and not event["void"]
        if known and (event["order"] in entries or event["order"] >= saved.ledger["num_picks"]):
            where = "" if event["order"] in entries else ", unknown to the checkpoint"
            lines[event["order"]] = (
                f"{event['prompt_id']} visit {event['visit']}: {event['state']} at step {event['step']}, open since step "
                f"{event['since_step']}{where}"
            )
    if not lines:
        return ["", f"stuck visits: none has been open for {limit} steps"]
    shown = [f"  {line}" for _, line in sorted(lines.items())[:MOST_STUCK]]
    more = [f"  and {len(lines) - MOST_STUCK:,} more"] if len(lines) > MOST_STUCK else []
    return ["", f"stuck visits: {len(lines):,}, open for {limit} steps or more", *shown, *more]


def _told(entry: Entry, state: str, now: int) -> str:
    visit = entry.pick.visit
    return f"{visit.prompt_id} visit {visit.number}: {state} at step {now}, open since step {entry.since}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns; numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(_pad(text, width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pad(text: str, width: int) -> str:
    return text.rjust(width) if text[:1].isdigit() and text.replace(",", "").isdigit() else text.ljust(width)
