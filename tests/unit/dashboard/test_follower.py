"""A journal that grows, and what a browser is told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.dashboard import follower as module
from liver_hpc.dashboard.follower import Ask, Follower
from liver_hpc.dashboard.page import Page
from liver_hpc.protocol.status import HandoffStatus
from liver_hpc.run.entries import JOURNAL_FILE, encode
from tests.unit.dashboard.journals import handoff_lines, started, step_lines
from tests.unit.report.journals import write_journal
from tests.unit.report.run_of_everything import HOSTILE, everything

LIMIT_S = 20.0


class Browser:
    """What it was told, put together as the page's script does."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._version = 0
        self.parts: dict[str, Any] = {}
        self.points: list[list[Any]] = []

    def look(self) -> dict[str, Any]:
        """Returns what was new."""
        text = self._page.event(self._version, 2000.0).decode()
        first, second = text.rstrip("\n").split("\n")
        assert first.startswith("id: ")
        news: dict[str, Any] = json.loads(second.removeprefix("data: "))
        self._version = self._page.version
        self.parts |= news
        if "curve" in news:
            self.points[news["curve"]["from"] :] = news["curve"]["points"]
        return news

    async def until(self, condition: Callable[[Browser], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.look()
                if condition(self):
                    return
                await self._page.changed


def follow(
    journal: Path, see: Callable[[Browser], Awaitable[None]], ask: Ask = lambda: None
) -> None:
    """Sees what a browser is told while a journal is followed."""

    async def both() -> None:
        page = Page()
        following = asyncio.create_task(Follower(journal, page, ask).follow())
        try:
            await see(Browser(page))
        finally:
            following.cancel()

    asyncio.run(both())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "ASK_S", 0.01)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "FIGURES_LEAST_S", 0.0)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL_FILE


def append(journal: Path, data: bytes) -> None:
    with journal.open("ab") as file:
        file.write(data)


def test_a_journal_is_followed_from_before_it_is_there(journal: Path) -> None:
    async def see(browser: Browser) -> None:
        await asyncio.sleep(0.05)
        append(journal, started())
        await browser.until(lambda b: b.parts.get("run", {}).get("state") == "starting")
        append(journal, step_lines(1, 3))
        await browser.until(lambda b: len(b.points) == 3)
        assert browser.parts["facts"]["step"] == "3 of 40"
        append(journal, step_lines(4, 1, first=3))
        await browser.until(lambda b: len(b.points) == 4)
        assert browser.parts["run"]["host"] == "n1"

    follow(journal, see)


@pytest.mark.parametrize(
    ("train", "left"), [("steps: 40", "37 s"), ("steps: 40, stop_every_steps: 10", "7.0 s")]
)
def test_the_time_that_is_left_is_that_until_it_stops(journal: Path, train: str, left: str) -> None:
    append(journal, started(train=train) + step_lines(1, 3))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "left" in b.parts.get("facts", {}))
        assert browser.parts["facts"]["left"] == left

    follow(journal, see)


def test_a_line_is_read_once_it_is_whole(journal: Path) -> None:
    line = step_lines(1, 1)

    async def see(browser: Browser) -> None:
        append(journal, started() + line[:50])
        await browser.until(lambda b: "run" in b.parts)
        await asyncio.sleep(0.05)
        assert browser.points == []
        append(journal, line[50:])
        await browser.until(lambda b: len(b.points) == 1)

    follow(journal, see)


def test_where_nothing_is_new_nothing_is_done(journal: Path) -> None:
    append(journal, started() + step_lines(1, 3))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "verdict" in b.parts)
        version = browser._page.version
        await asyncio.sleep(0.1)
        assert browser._page.version == version

    follow(journal, see)


def test_what_is_new_is_all_that_is_told(journal: Path) -> None:
    append(journal, started() + step_lines(1, 3))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "verdict" in b.parts)
        append(journal, step_lines(4, 1, first=3))
        await browser._page.changed
        news = browser.look()
        assert news["curve"]["from"] == 3
        assert len(news["curve"]["points"]) == 1
        assert {"nodes", "notes", "worlds", "handoff"} & news.keys() == set()

    follow(journal, see)


def test_the_first_step_of_a_start_begins_by_itself(journal: Path) -> None:
    append(journal, started() + step_lines(1, 1) + started(2) + step_lines(3, 1, 1, 36001.0))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: len(b.points) == 2)
        assert [point[:2] for point in browser.points] == [[0.0, 1.0], [35001.0, 35002.0]]

    follow(journal, see)


@pytest.mark.parametrize("live", [True, False])
def test_a_step_begins_with_the_end_of_an_evaluation_that_was_read_before_it(
    journal: Path, live: bool
) -> None:
    times = {"started_s": 1001.0, "ended_s": 1009.0}
    evaluation = {"step": 1, "generation": 0, "loss": 1.0, "batches": 1, **times}
    record = {"type": "record", "table": "evaluations", "row": evaluation}
    told = {"type": "evaluated", "worker": 0, **evaluation}
    append(journal, started() + step_lines(1, 1) + encode(2, 1009.0, told, [record]))

    async def see(browser: Browser) -> None:
        if live:
            await browser.until(lambda b: bool(b.parts.get("evaluations")))
        append(journal, step_lines(3, 1, first=1, began_s=1009.0))
        await browser.until(lambda b: len(b.points) == 2)
        assert browser.points[1][:2] == [9.0, 10.0]

    follow(journal, see)


def test_a_damaged_journal_is_told_and_the_page_stays(journal: Path) -> None:
    append(journal, started() + step_lines(1, 1).replace(b'"loss":', b'"less":'))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "line 2 is damaged" in b.parts.get("problem", ""))

    follow(journal, see)


def test_a_journal_that_is_not_to_be_had_for_a_moment_is_read_again(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the node is evicted from the file system, or the file has been replaced."""
    append(journal, started() + step_lines(1, 1))
    opened, away = Path.open, list[OSError]()

    def once(path: Path, *how: Any, **more: Any) -> Any:
        if path == journal and away and how == ("rb",):
            raise away[0]
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", once)

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: len(b.points) == 1)
        away.append(OSError(5, "Input/output error"))
        await browser.until(lambda b: "Input/output error" in b.parts.get("problem", ""))
        away.clear()
        append(journal, step_lines(2, 1, first=1))
        await browser.until(lambda b: len(b.points) == 2 and not b.parts["problem"])

    follow(journal, see)


def test_what_comes_out_of_order_is_read_once_it_is_there(journal: Path) -> None:
    """NFS may show a hole before a later part of what is being written."""
    lines = step_lines(1, 4)
    append(journal, started() + b"\0" * 200 + lines[200:])

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "is damaged" in b.parts.get("problem", ""))
        journal.write_bytes(started() + lines)
        await browser.until(lambda b: len(b.points) == 4 and not b.parts["problem"])

    follow(journal, see)


def test_a_journal_that_is_begun_anew_is_followed_from_its_beginning(journal: Path) -> None:
    """As after damage, for which the one before is set aside."""
    append(journal, started() + step_lines(1, 3))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: len(b.points) == 3)
        append(journal, b"damage\n")
        await browser.until(lambda b: "is damaged" in b.parts.get("problem", ""))
        journal.rename(journal.with_suffix(".1.jsonl"))
        append(journal, started())
        await browser.until(lambda b: b.points == [])
        append(journal, step_lines(1, 2, first=3))
        await browser.until(lambda b: len(b.points) == 2)
        assert browser.parts["facts"]["step"] == "5 of 40"
        assert browser.parts["problem"] == ""

    follow(journal, see)


PHASES = {
    "BOOT": b'"attempt_begins"',
    "PREPARE": b'"type":"prepare"',
    "ARMED": b'"type":"arm"',
    "TRANSFER": b'"type":"vote"',
    "RELEASE": b'"type":"verdict"',
}
"""Each phase with what the line has that it begins with."""


def test_what_this_release_cannot_read_is_told_with_its_entry(journal: Path) -> None:
    append(journal, started() + encode(1, 1001.0, {"type": "node_granted", "knot": "n1"}))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "problem" in b.parts)
        assert "entry 1: 'node'; another version" in browser.parts["problem"]

    follow(journal, see)


def test_a_handoff_is_drawn_while_it_runs_and_told_of_afterwards(journal: Path) -> None:
    lines = handoff_lines()
    append(journal, started())

    async def see(browser: Browser) -> None:
        written = 0
        for phase, words in PHASES.items():
            until = _index(lines, words) + 1
            append(journal, b"".join(lines[written:until]))
            written = until
            await browser.until(lambda b: _phase(b) == phase)  # noqa: B023
            handoff = browser.parts["handoff"]
            assert browser.parts["run"]["state"] == "handing over"
            assert {lane["worker"] for lane in handoff["lanes"]} == {0, 1, 2, 3}
            assert handoff["phases"][-1][2] is None
        append(journal, b"".join(lines[written:]))
        await browser.until(lambda b: bool(b.parts.get("handoffs")))
        assert browser.parts["handoff"] is None
        (handoff,) = browser.parts["handoffs"]
        assert "completed" in handoff["line"]
        phases = [name for name, _, _ in handoff["phases"]]
        assert phases == ["BOOT", "PREPARE", "BOUNDARY", "TRANSFER", "COMMIT", "RELEASE"]
        (mark,) = browser.parts["marks"]
        assert (mark["generation"], mark["completed"]) == (1, True)
        assert [layout for _, layout, *_ in browser.parts["worlds"]] == ["dp2", "tp2 dp2"]

    follow(journal, see)


def _phase(browser: Browser) -> str:
    handoff = browser.parts.get("handoff")
    return handoff["phase"] if handoff else ""


def test_a_coordinator_that_answers_says_how_many_bytes_have_come(journal: Path) -> None:
    lines = handoff_lines()
    append(journal, started() + b"".join(lines[: _index(lines, b'"type":"arm"') + 1]))

    def ask() -> HandoffStatus:
        return HandoffStatus(
            generation=1, phase="ARMED", source="", target="", notice="", since_s=0.0,
            bytes_done=77, bytes_total=100, waiting_for=(),
        )  # fmt: skip

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: (b.parts.get("handoff") or {"bytes": [0]})["bytes"][0] == 77)

    follow(journal, see, ask)


def _index(lines: list[bytes], words: bytes) -> int:
    return next(number for number, line in enumerate(lines) if words in line)


def test_nothing_that_a_run_is_named_can_do_harm(tmp_path: Path) -> None:
    """What is told as HTML comes from an element tree, all else as text."""
    records = everything()
    write_journal(
        tmp_path, replace(records, attributes=records.attributes | {"config": "setup: [KEY=7]"})
    )

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "handoffs" in b.parts)
        told = browser.parts
        for html in (told["tables"], told["verdict"], *(each["line"] for each in told["handoffs"])):
            assert "<script" not in html
        assert HOSTILE in told["run"]["name"]
        assert "KEY=7" not in json.dumps(told)

    follow(tmp_path / JOURNAL_FILE, see)


def test_a_journal_that_was_played_before_is_read_in_parts(journal: Path) -> None:
    """Of a long run the page is told while it is read, and the curve stays short."""
    append(journal, started() + step_lines(1, 20_000))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: b.parts.get("facts", {}).get("step") == "20000 of 40")
        assert 500 < len(browser.points) <= 1200

    follow(journal, see)


def test_an_entry_that_nobody_knows_is_passed_over(journal: Path) -> None:
    append(journal, started() + encode(1, 1001.0, {"type": "painted"}, [{"type": "paint"}]))

    async def see(browser: Browser) -> None:
        await browser.until(lambda b: "verdict" in b.parts)
        assert "problem" not in browser.parts

    follow(journal, see)
