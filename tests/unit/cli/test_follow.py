"""Watching a run: until when, and what is seen of it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from liver_hpc.cli.follow import PlainLines, follow, status_text, view
from liver_hpc.errors import LiverError
from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot

SHOW_CURSOR = "\x1b[?25h"
BAR = (
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
    "\N{BOX DRAWINGS HEAVY LEFT}",
    "\N{BOX DRAWINGS HEAVY RIGHT}",
)


def status(**changes: Any) -> StatusSnapshot:
    values: dict[str, Any] = {
        "run": "demo-1",
        "state": "training",
        "step": 42,
        "steps": 120,
        "loss": 3.41234,
        "grad_norm": 0.8311,
        "tokens_per_s": 4812.4,
        "step_s": 0.2512,
        "left_s": 78 * 0.2512,
        "generation": 3,
        "layout": "tp2 pp1 dp2",
        "workers": (0, 1, 4, 5),
        "handoffs_done": 3,
        "handoffs_aborted": 1,
        "queued": (),
        "handoff": None,
        "last_event": "generation 3: completed",
        "journal_error": "",
        "now_s": 1000.0,
    }
    return StatusSnapshot(**values | changes)


def handoff(**changes: Any) -> HandoffStatus:
    values: dict[str, Any] = {
        "generation": 4,
        "phase": "TRANSFER",
        "source": "tp2 pp1 dp2",
        "target": "tp1 pp2 dp2",
        "notice": "resize to tp1 pp2 dp2 (operator)",
        "since_s": 996.8,
        "bytes_done": 128 * 2**20,
        "bytes_total": 512 * 2**20,
        "waiting_for": (4, 5),
    }
    return HandoffStatus(**values | changes)


def source(
    snapshots: Iterable[StatusSnapshot | None],
) -> Callable[[], StatusSnapshot | None]:
    """Gives them one by one; fails the test when it is asked for more."""
    iterator = iter(snapshots)
    return lambda: next(iterator)


def plain_console(text: io.StringIO) -> Console:
    return Console(file=text, width=40)


def terminal(text: io.StringIO, columns: int = 80) -> Console:
    return Console(file=text, width=columns, height=40, force_terminal=True)


@pytest.fixture(autouse=True)
def known_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests themselves run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


# ---- until when


@pytest.mark.parametrize("state", ["finished", "failed"])
@pytest.mark.parametrize("console", [plain_console, terminal])
def test_it_ends_with_the_run(state: str, console: Callable[[io.StringIO], Console]) -> None:
    waits: list[float] = []
    snapshots = source([status(state="starting"), status(), status(state=state, step=43)])
    text = io.StringIO()
    follow(snapshots, console(text), 0.25, waits.append)
    assert state in text.getvalue()
    assert waits == [0.25, 0.25]


@pytest.mark.parametrize("console", [plain_console, terminal])
def test_it_ends_when_the_coordinator_has_gone(
    console: Callable[[io.StringIO], Console],
) -> None:
    snapshots = source([status(), status(step=43), None])
    waits: list[float] = []
    follow(snapshots, console(io.StringIO()), 0.25, waits.append)
    assert waits == [0.25, 0.25]


@pytest.mark.parametrize("console", [plain_console, terminal])
def test_of_a_run_that_never_answers_there_is_nothing(
    console: Callable[[io.StringIO], Console],
) -> None:
    text = io.StringIO()
    follow(source([None]), console(text), 0.25, lambda s: None)
    assert "run" not in text.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LiverError("hung up")])
def test_an_interruption_restores_the_terminal_and_goes_on(error: BaseException) -> None:
    def interrupted(seconds: float) -> None:
        raise error

    text = io.StringIO()
    with pytest.raises(type(error)):
        follow(source([status()]), terminal(text), 0.25, interrupted)
    assert text.getvalue().rstrip("\n").endswith(SHOW_CURSOR)


# ---- the view


def lines_of(snapshot: StatusSnapshot, columns: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=columns).print(view(snapshot))
    return text.getvalue().splitlines()


def test_the_view_tells_where_the_run_stands() -> None:
    seen = "\n".join(lines_of(status(queued=("replace worker 3 (operator)",)), 80))
    for part in (
        "demo-1 training",
        "step 42 of 120, 20 s left",
        "loss 3.4123",
        "gradient norm 0.831",
        "4812 tokens/s",
        "0.251 s a step",
        "tp2 dp2",
        "generation 3",
        "workers 0-1, 4-5",
        "3 done, 1 aborted; queued: replace worker 3 (operator)",
        "none in progress",
        "generation 3: completed",
    ):
        assert part in seen


@pytest.mark.parametrize("columns", [80, 120])
def test_the_view_tells_how_a_handoff_goes(columns: int) -> None:
    seen = "\n".join(lines_of(status(handoff=handoff()), columns))
    for part in (
        "tp2 dp2 to pp2 dp2",
        "generation 4",
        "resize to tp1 pp2 dp2 (operator)",
        "boot  prepare  armed  transfer  release",
        "3.2 s",
        "128.0 MiB of 512.0 MiB",
        "waits for workers 4-5",
    ):
        assert part in seen


def test_an_abort_takes_the_place_of_the_phases() -> None:
    seen = "\n".join(lines_of(status(handoff=handoff(phase="ABORT")), 80))
    assert "abort" in seen
    assert "prepare" not in seen


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_the_view_keeps_its_shape(columns: int) -> None:
    """Nothing moves when a handoff begins or ends, and a long text does not push the rest down."""
    long = "tp16 pp16 dp128 and much more " * 10
    views = [
        lines_of(status(), columns),
        lines_of(status(handoff=handoff()), columns),
        lines_of(status(handoff=handoff(bytes_total=0, bytes_done=0, waiting_for=())), columns),
        lines_of(status(handoff=handoff(notice=long), last_event=long + "\n" + long), columns),
        lines_of(status(queued=(long, long), workers=tuple(range(0, 999, 2))), columns),
        lines_of(status(loss=None, grad_norm=None, tokens_per_s=None, step_s=None), columns),
    ]
    assert {len(lines) for lines in views} == {len(views[0])}
    assert {cell_len(line) for lines in views for line in lines} == {min(columns, 120)}


def test_a_bar_keeps_its_length_while_figures_change() -> None:
    def bar_columns(snapshot: StatusSnapshot) -> int:
        text = io.StringIO()
        console = Console(file=text, width=80, force_terminal=True, color_system="truecolor")
        console.print(view(snapshot))
        (line,) = [line for line in text.getvalue().splitlines() if " of 120" in line]
        return sum(line.count(part) for part in BAR)

    lengths = {bar_columns(status(step=step, step_s=step / 7)) for step in (1, 42, 119, 120)}
    assert len(lengths) == 1


@pytest.mark.parametrize("error", ["journal_error", "checkpoint_error"])
def test_the_view_tells_what_cannot_be_written(error: str) -> None:
    assert "the disk is full" in "\n".join(lines_of(status(**{error: "the disk is full"}), 80))


def test_the_newest_checkpoint_is_told_and_that_the_next_has_failed() -> None:
    assert "checkpoint" not in status_text(status())
    assert "\ncheckpoint: the newest is of step 40\n" in status_text(status(checkpointed=40))
    failed = status(checkpointed=40, checkpoint_error="checkpoint of step 41: the disk is full")
    assert "of step 40; checkpoint of step 41: the disk is full\n" in status_text(failed)


def test_texts_are_not_read_as_markup() -> None:
    event = "[red]gone[/nothing] :smile:"
    assert event in "\n".join(lines_of(status(last_event=event, run="[bold]"), 80))
    text = io.StringIO()
    follow(source([status(last_event=event), None]), plain_console(text), 0.0, lambda s: None)
    assert f"event: {event}" in text.getvalue()


# ---- plain lines


def test_plain_lines_have_no_escape_codes_and_are_not_wrapped() -> None:
    text = io.StringIO()
    snapshots = source([status(handoff=handoff()), None])
    follow(snapshots, plain_console(text), 0.0, lambda s: None)
    assert text.getvalue().splitlines() == [
        "run demo-1: training",
        "event: generation 3: completed",
        "handoff to generation 4: TRANSFER, for 3.2 s, "
        "128.0 MiB of 512.0 MiB, waits for workers 4-5",
        "step 42 of 120: loss 3.4123, gradient norm 0.831, 4812 tokens/s, "
        "tp2 pp1 dp2 (generation 3)",
    ]


def test_a_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = io.StringIO()
    follow(source([status(), None]), terminal(text), 0.0, lambda s: None)
    assert text.getvalue().startswith("run demo-1: training\n")
    assert "\x1b" not in text.getvalue()


def new_lines(*snapshots: StatusSnapshot) -> list[str]:
    """What the last snapshot adds."""
    lines = PlainLines()
    *_, last = [list(lines.of(snapshot)) for snapshot in snapshots]
    return last


def test_what_has_not_changed_is_not_said_again() -> None:
    busy = status(handoff=handoff(), queued=("replace worker 3",), journal_error="full")
    assert new_lines(busy, busy) == []


def test_a_step_in_about_ten_is_told_and_the_last() -> None:
    lines = PlainLines()
    snapshots = [status(step=step) for step in range(1, 36)]
    snapshots.append(status(step=36, state="finished"))
    told = [line for snapshot in snapshots for line in lines.of(snapshot) if "loss" in line]
    assert [line.split()[1] for line in told] == ["1", "10", "20", "30", "36"]


def test_the_last_step_is_told_once() -> None:
    lines = new_lines(status(step=40), status(step=40, state="finished"))
    assert lines == ["run demo-1: finished"]


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (status(), status(state="stopping"), "run demo-1: stopping"),
        (status(), status(last_event="worker 3 has ended"), "event: worker 3 has ended"),
        (status(), status(queued=("replace worker 3",)), "queued: replace worker 3"),
        (status(), status(journal_error="full"), "journal: full"),
        (status(journal_error="full"), status(), "journal: written again"),
        (
            status(),
            status(validation_loss=2.71828, evaluated=40),
            "validation: loss 2.7183 after 40 steps",
        ),
        (
            status(handoff=handoff()),
            status(handoff=handoff(phase="RELEASE", waiting_for=())),
            "handoff to generation 4: RELEASE, for 3.2 s, 128.0 MiB of 512.0 MiB",
        ),
    ],
)
def test_a_change_is_told(before: StatusSnapshot, now: StatusSnapshot, line: str) -> None:
    assert new_lines(before, now) == [line]


def test_without_a_step_no_figures_are_told() -> None:
    lines = new_lines(status(state="starting", step=0, loss=None))
    assert lines == ["run demo-1: starting", "event: generation 3: completed"]


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_told(value: float, word: str) -> None:
    bad = status(loss=value, grad_norm=value)
    seen = "\n".join(lines_of(bad, 80))
    assert f"loss {word}  gradient norm {word}" in seen
    assert f"loss {word}, gradient norm {word}" in new_lines(bad)[-1]
    assert f"step 42 of 120: loss {word}, " in status_text(bad)


# ---- `liver status`


def test_status_is_all_of_it() -> None:
    busy = status(
        handoff=handoff(), queued=("replace worker 3",), nodes=("n1: 2 of 2 used",), spares=(4,)
    )
    busy = busy.model_copy(update={"handoffs_failed": 2})
    busy = busy.model_copy(update={"validation_loss": 2.71828, "evaluated": 40})
    busy = busy.model_copy(update={"observed": 2, "would_have": "would have begun it; stays"})
    assert status_text(busy).splitlines() == [
        "run demo-1: training, step 42 of 120: loss 3.4123, gradient norm 0.831, 4812 tokens/s, "
        "tp2 pp1 dp2 (generation 3)",
        "workers 0-1, 4-5",
        "handoffs: 3 done, 1 aborted, 2 failed",
        "handoff to generation 4: TRANSFER, for 3.2 s, 128.0 MiB of 512.0 MiB, "
        "waits for workers 4-5",
        "validation: loss 2.7183 after 40 steps",
        "queued: replace worker 3",
        "nodes: n1: 2 of 2 used",
        "spare: workers 4, booted, without a seat",
        "observed: would have begun it; stays (2 times in all)",
        "last event: generation 3: completed",
    ]
