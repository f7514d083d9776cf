"""TensorBoard's event files. One directory is one run, whoever writes there next."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from liver_hpc.tracking.base import Mark, Point, Tracker

VERSION = "brain.Event:2"
"""The version of the files, in which the start of a session ends what was written for its step and
those after it."""


class TensorBoard(Tracker):
    """Steps that are done again take the place of what was written for them: a session that starts
    at their first one says so. Marks, which are texts, stay: those that it ends are written again.
    """

    def __init__(self, directory: Path, before: list[Mark], step: int, now_s: float) -> None:
        """Goes on in `directory` after `step` steps. before: marks that are there."""
        directory.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names.
        name = f"events.out.tfevents.{now_s:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((directory / name).open("wb"))
        self._marks: dict[tuple[str, int], list[Mark]] = {}
        for mark in before:
            self._marks_like(mark).append(mark)
        self._written = step
        self._write(Event(wall_time=now_s, file_version=VERSION))
        self._begin(step + 1, now_s)

    def take(self, what: Point | Mark) -> None:
        if isinstance(what, Mark):
            marks = self._marks_like(what)
            marks.append(what)
            self._mark(marks)
            return
        if what.is_step and what.step <= self._written:  # of steps done again the first
            self._begin(what.step, what.at_s)
        self._written = max(self._written, what.step)
        values = [Summary.Value(tag=k, simple_value=value) for k, value in what.values.items()]
        self._write(Event(wall_time=what.at_s, step=what.step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _begin(self, step: int, at_s: float) -> None:
        """What was written for `step` and for what follows it counts no longer."""
        started = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=at_s, step=step, session_log=started))
        self._written = step - 1
        for marks in self._marks.values():
            if marks[-1].step >= step:
                self._mark(marks)

    def _marks_like(self, mark: Mark) -> list[Mark]:
        """All of a kind that came at one step."""
        return self._marks.setdefault((mark.kind, mark.step), [])

    def _mark(self, marks: list[Mark]) -> None:
        """They are one text: of two the page shows the last."""
        mark = marks[-1]
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=["\n\n".join(each.text for each in marks).encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        tag = f"events/{mark.kind}"
        value = Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)
        self._write(Event(wall_time=mark.at_s, step=mark.step, summary=Summary(value=[value])))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
