"""Follows a run's journal for the page: reads what is new, and says in words where the run stands.

It needs no coordinator. It asks one only for how many bytes of a handoff have come so far, which no
journal has.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from liver_hpc.dashboard.attempt import LiveAttempt, follow_attempt
from liver_hpc.dashboard.page import Page
from liver_hpc.dashboard.recorded import lanes, parts
from liver_hpc.dashboard.standing import NodeLine, Span, Standing
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.layout.ramp import steps_between
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.status import HandoffStatus
from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import RecordsFold
from liver_hpc.report.wording import duration_text, layout_text, number_text
from liver_hpc.run.entries import COORDINATOR_STARTED, Entry, JournalReader
from liver_hpc.run.lifecycle import HANDING_OVER, TRAINING

LOOK_S = 0.2
"""A file cannot say that it has grown, on a shared file system least of all: so often it is looked
at."""
ASK_S = 0.25
AGAIN_S = 2.0
"""So long after a journal could not be read it is tried again."""
FIGURES_SHARE, FIGURES_LEAST_S = 0.05, 5.0
"""The part of the time that computing the figures again may take; and the least pause where
nothing but steps has come."""
BEHIND_BYTES = 2**16
"""With more than this to be read, nothing is computed that takes long."""
MOST_NODES = 64
MOST_EVALUATIONS = 400

Ask = Callable[[], HandoffStatus | None]
"""What a coordinator says of the handoff in progress; None where nobody answers."""


class Follower:
    """Reads a journal, which need not be there yet, for as long as `follow` runs."""

    def __init__(self, journal: Path, page: Page, ask: Ask) -> None:
        self._journal = journal
        self._page = page
        self._ask = ask
        self._reader = JournalReader(journal)
        self._asking = threading.Thread()
        self._begin()
        self._is_stale = self._is_urgent = True  # the figures
        self._figures_at_s = self._figures_took_s = 0.0

    def _begin(self) -> None:
        """Nothing is known of the run."""
        self._gathered = RecordsFold()
        self._held = self._gathered.held
        self._standing = Standing(self._held)
        self._attempt: LiveAttempt | None = None
        self._steps = self._evaluations = 0  # that the curve has

    async def follow(self) -> None:
        """Never returns: a run that has ended may go on. While a journal cannot be read, or is
        damaged, the page says why, and it is read again: a file system of the network may fail for
        a moment, or show a later part of what is being written before an earlier one. One that
        this release cannot read is followed no longer, until there is another one in its place."""
        is_read = True
        while True:
            try:
                entries = self._reader.more() if self._journal.exists() else []
            except (ConfigError, OSError) as error:
                is_read = False
                self._page.put({"problem": str(error)})
                self._page.publish()
                await asyncio.sleep(AGAIN_S)
                continue
            if not is_read:
                is_read = True
                self._page.put({"problem": ""})
                self._page.publish()
            try:
                self._take(entries)
            except ConfigError as error:
                self._page.put({"problem": str(error)})
                self._page.publish()
                unreadable = self._file()
                while self._file() == unreadable:
                    await asyncio.sleep(LOOK_S)
                self._page.put({"problem": ""})
                continue
            if entries or self._are_figures_due():
                await self._tell()
            await asyncio.sleep(0 if entries else LOOK_S)

    def _file(self) -> int | None:
        return self._journal.stat().st_ino if self._journal.exists() else None

    def _take(self, entries: list[Entry]) -> None:
        """Raises ConfigError for what this release cannot read."""
        page, before = self._page, self._attempt
        if entries and entries[0].number == 0:  # a damaged journal may have been set aside
            self._begin()
            page.begin()
        for entry in entries:
            if entry.event["type"] == COORDINATOR_STARTED:
                self._draw()
                page.curve.started()
            self._gathered.take(entry)
            try:
                self._standing.take(entry)
                self._attempt = follow_attempt(self._attempt, entry, self._held.node_of)
            except (KeyError, TypeError, ValueError) as error:
                where = f"{self._journal}, entry {entry.number}: {error}"
                raise ConfigError(f"{where}; another version of liver_hpc wrote it") from None
        page.began_s = self._standing.began_s
        self._draw()
        self._is_stale = self._is_stale or bool(entries)
        self._is_urgent = self._is_urgent or self._attempt is not before
        if self._attempt is not None and self._attempt.moves:
            self._ask_beside()

    def _draw(self) -> None:
        """The curve has the steps that were gathered since."""
        page, records = self._page, self._gathered.records
        evaluations = records.evaluations[self._evaluations :]
        for step in records.steps[self._steps :]:
            while evaluations and evaluations[0].ended_s <= step.ended_s:
                page.curve.evaluated(evaluations.pop(0).ended_s)
            page.curve.add(step, page.version + 1)
        self._steps = len(records.steps)
        self._evaluations = len(records.evaluations) - len(evaluations)  # some are of the next step

    # ---- the page is told

    async def _tell(self) -> None:
        self._page.put(self._live())
        if self._are_figures_due() and self._unread_bytes() < BEHIND_BYTES:
            began_s, records = monotonic(), self._gathered.records
            figures = await asyncio.to_thread(run_figures, records)
            self._page.put(parts(records, figures, self._page.since))
            self._figures_at_s = monotonic()
            self._figures_took_s = self._figures_at_s - began_s
            self._is_stale = self._is_urgent = False
        self._page.publish()

    def _are_figures_due(self) -> bool:
        least_s = 0.0 if self._is_urgent else FIGURES_LEAST_S
        pause_s = max(least_s, self._figures_took_s / FIGURES_SHARE)
        return self._is_stale and monotonic() >= self._figures_at_s + pause_s

    def _unread_bytes(self) -> int:
        """Of the journal, as far as it has been written."""
        try:
            size_bytes = self._journal.stat().st_size
        except OSError:  # it is not there yet, or not to be had now
            return 0
        return max(0, size_bytes - self._reader.read_bytes)

    def _live(self) -> dict[str, Any]:
        standing, since = self._standing, self._page.since
        state = standing.state
        if self._attempt is not None and state == TRAINING:
            state = HANDING_OVER
        read_bytes = self._reader.read_bytes
        return {
            "run": {
                "name": standing.name,
                "host": standing.host,
                "state": state,
                "reason": standing.reason,
                "ended": standing.ended,
                "last": since(standing.last_s),
                "read": round(read_bytes / max(read_bytes + self._unread_bytes(), 1), 2),
            },
            "facts": dict(self._facts()),
            "notes": [[since(at_s), text] for at_s, text in standing.notes],
            "worlds": [
                [w.generation, layout_text(str(w.rank_map.layout)), len(w.rank_map.workers),
                 since(w.from_s), since(w.until_s)]
                for w in standing.worlds
            ],
            "nodes": [self._node(line) for line in [*standing.nodes.values()][-MOST_NODES:]],
            "evaluations": [
                [since(each.ended_s), each.step, each.loss]
                for each in _some(self._gathered.records.evaluations, MOST_EVALUATIONS)
            ],
            "handoff": None if self._attempt is None else self._handoff(self._attempt),
        }  # fmt: skip

    def _facts(self) -> Iterator[tuple[str, str]]:
        """What the run does now, by name."""
        standing, records = self._standing, self._gathered.records
        last, world = records.steps[-1] if records.steps else None, standing.world
        train = standing.train
        if last is not None:
            yield "step", f"{last.step + 1} of {'?' if train is None else train.steps}"
        if world is not None:
            yield "layout", layout_text(str(world.rank_map.layout))
            yield "workers", ids_text(world.rank_map.workers)
            yield "generation", str(world.generation)
        if last is not None:
            took_s = last.ended_s - last.started_s
            yield "loss", f"{last.loss:.4f}"
            yield "tokens/s", number_text(last.tokens / took_s if took_s > 0 else math.nan)
            yield "seconds a step", number_text(took_s)
            end = 0 if train is None or standing.ended else train.last_step(last.step)
            if train is not None and end > last.step + 1:
                left = steps_between(train, last.step, end) - 1
                yield "left", duration_text(left * took_s)
        if records.evaluations:
            evaluation = records.evaluations[-1]
            yield "validation", f"{evaluation.loss:.4f} after {evaluation.step} steps"

    def _node(self, line: NodeLine) -> dict[str, Any]:
        since = self._page.since

        def shown(span: Span) -> list[Any]:
            times = since(span.from_s), since(span.until_s), since(span.deadline_s)
            return [*times, span.workers, span.reason]

        return {
            "name": line.name or line.allocation,
            "allocation": line.allocation,
            "held": [*map(shown, line.held)],
            "used": [*map(shown, line.used)],
            "warned": [*map(shown, line.warned)],
        }

    def _handoff(self, attempt: LiveAttempt) -> dict[str, Any]:
        notes, since = attempt.notes, self._page.since
        request = notes.request
        source, target = request.source.rank_map, notes.target or request.target
        waits_for = attempt.waits_for()
        return {
            "generation": notes.generation,
            "source": layout_text(str(source.layout)),
            "target": layout_text(str(target.layout)),
            "notice": request.notice,
            "phase": str(attempt.phase),
            "boundary": since(attempt.boundary_s),
            "phases": [[name, since(a), since(b)] for name, a, b in attempt.phases()],
            "lanes": lanes(
                attempt.lanes(self._held.node_of), source.workers, target.workers, since
            ),
            "bytes": [attempt.bytes_done, notes.bytes_total],
            "votes": [len(notes.said(m.Vote)), len(attempt.workers)],
            "waits": ids_text(waits_for) if waits_for else "",
        }

    # ---- what no journal has

    def _ask_beside(self) -> None:
        """In a thread of its own for as long as the state moves: a coordinator that is gone may
        take a while to be found so."""
        if not self._asking.is_alive():
            arguments = (self._attempt, asyncio.get_running_loop())
            self._asking = threading.Thread(target=self._ask_on, args=arguments, daemon=True)
            self._asking.start()

    def _ask_on(self, attempt: LiveAttempt, loop: asyncio.AbstractEventLoop) -> None:
        pause = threading.Event()
        while attempt is self._attempt and attempt.moves:
            if (status := self._ask()) is None or loop.is_closed():
                return
            if status.generation == attempt.notes.generation:
                loop.call_soon_threadsafe(self._bytes_told, attempt, status.bytes_done)
            pause.wait(ASK_S)

    def _bytes_told(self, attempt: LiveAttempt, bytes_done: int) -> None:
        if attempt is self._attempt and bytes_done > attempt.bytes_told:
            attempt.bytes_told = bytes_done
            self._page.put({"handoff": self._handoff(attempt)})
            self._page.publish()


def _some(rows: list[Any], most: int) -> list[Any]:
    """Every n-th, and the last."""
    every = -(-len(rows) // most) or 1
    return [*rows[:-1:every], *rows[-1:]]
