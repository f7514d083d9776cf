"""What TensorBoard's own reader finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.tracking.base import Mark, Point

READERS = "tensorboard.backend.event_processing"
event_accumulator = pytest.importorskip(f"{READERS}.event_accumulator")
plugin_event_accumulator = pytest.importorskip(f"{READERS}.plugin_event_accumulator")


def opened(path: Path, step: int, now_s: float, marks: list[Mark] | None = None) -> Any:
    from liver_hpc.tracking.tensorboard import TensorBoard

    return TensorBoard(path, marks or [], step, now_s)


def losses(path: Path) -> list[tuple[int, float]]:
    reader = event_accumulator.EventAccumulator(str(path))
    reader.Reload()
    return [(each.step, each.value) for each in reader.Scalars("train/loss")]


def texts(path: Path, kind: str) -> list[tuple[int, str]]:
    """As the page has them, whose reader lets a session that starts end texts, too."""
    reader = plugin_event_accumulator.EventAccumulator(str(path))
    reader.Reload()
    found = reader.Tensors(f"events/{kind}")
    return [(each.step, each.tensor_proto.string_val[0].decode()) for each in found]


def point(step: int, loss: float) -> Point:
    return Point(step, 1000.0 + step, {"train/loss": loss})


def test_values_and_marks_are_read_back(tmp_path: Path) -> None:
    board = opened(tmp_path, 0, 1.0)
    for what in (point(1, 4.0), Mark(1, 1001.5, "handoff", "dp2 -> dp4"), point(2, 3.0)):
        board.take(what)
    board.flush()  # what is not closed is there, too
    assert losses(tmp_path) == [(1, 4.0), (2, 3.0)]
    assert texts(tmp_path, "handoff") == [(1, "dp2 -> dp4")]
    board.close()


def test_steps_done_again_take_the_place_of_the_first_and_marks_stay(tmp_path: Path) -> None:
    board = opened(tmp_path, 0, 1.0)
    for step in (1, 2, 3):
        board.take(point(step, float(step)))
    board.take(Mark(3, 1003.5, "recovery", "back to step 1"))
    board.take(Point(3, 1003.6, {"run/goodput": 0.5}))
    for step in (2, 3, 4):
        board.take(point(step, 10.0 * step))
    board.close()
    assert losses(tmp_path) == [(1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert texts(tmp_path, "recovery") == [(3, "back to step 1")]


def test_what_the_next_process_tells_again_is_there_once(tmp_path: Path) -> None:
    """The first was killed after it had told step 3, and before it had noted that."""
    first = opened(tmp_path, 0, 1.0)
    marks = [Mark(1, 1001.5, "handoff", "a"), Mark(2, 1002.5, "recovery", "d")]
    for what in (point(1, 1.0), marks[0], point(2, 2.0), marks[1], point(3, 3.0)):
        first.take(what)
    first.close()
    second = opened(tmp_path, 1, 2.0, marks)
    second.take(point(2, 2.0))
    second.take(point(3, 3.5))
    second.take(Mark(3, 1004.0, "handoff", "b"))
    second.take(Mark(3, 1004.0, "handoff", "c"))
    second.close()
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.5)]
    assert texts(tmp_path, "handoff") == [(1, "a"), (3, "b"), (3, "b\n\nc")]
    assert texts(tmp_path, "recovery") == [(2, "d")]
