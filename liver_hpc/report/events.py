"""What happened in a run, as lines: the fold of its journal into what an operator would want to
know. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from liver_hpc.report.wording import NOTHING, bytes_text, duration_text, layout_text, strict
from liver_hpc.run.codec import RECORDS, record_of, rows_of
from liver_hpc.run.entries import COORDINATOR_STARTED, STEP_DONE, Entry
from liver_hpc.run.observation import WOULD_HAVE
from liver_hpc.run.records import (
    TABLES,
    NoticeRecord,
    ObservationRecord,
    ReconfigurationRecord,
    RecoveryRecord,
    StragglerRecord,
)
from liver_hpc.run.stragglers import NAMED


@dataclass(frozen=True)
class RunEvent:
    """One line. at_s: epoch seconds. step: how many were done. kind: "start", "asked",
    "checkpoint", "note", "reconfiguration", "recovery", "notice", "observation" or "straggler".
    text: for people. data: what programs read; of the last five kinds the columns of their tables
    in the metrics."""

    at_s: float
    step: int
    kind: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For programs; what is not known is None."""
        about = {"t": self.at_s, "step": self.step, "kind": self.kind, "text": self.text}
        return {**about, "data": strict(self.data)}


def events_of(entries: Iterable[Entry]) -> Iterator[RunEvent]:
    """Each as soon as its entry is there."""
    step = 0
    for entry in entries:
        event, kind = entry.event, entry.event.get("type")
        if kind == STEP_DONE:
            step = event["step"] + 1
        elif kind == COORDINATOR_STARTED and event.get("resumed"):
            step = event["resumed"]["step"]
        told = _TOLD.get(str(kind))
        if told is not None:
            name, words = told
            yield RunEvent(entry.at_s, step, name, words(event), _data(event))
        for action in entry.actions:
            yield from _of_action(action, entry, step)


def _of_action(action: Mapping[str, Any], entry: Entry, step: int) -> Iterator[RunEvent]:
    kind = action["type"]
    # What is noted of a checkpoint stands in its event, of an observation or a straggler in its
    # record.
    if kind == "note":
        told = entry.event.get("type") == "checkpoint_written"
        if not (told or action["text"].startswith(WOULD_HAVE) or NAMED in action["text"]):
            yield RunEvent(entry.at_s, step, "note", action["text"])
    elif kind == "answer":
        answer = "" if action["ok"] else "refused: "
        yield RunEvent(entry.at_s, step, "note", f"told the operator: {answer}{action['text']}")
    yield from recorded(action, entry.at_s, step)


def recorded(action: Mapping[str, Any], at_s: float, step: int) -> Iterator[RunEvent]:
    """What an action records that is told."""
    if action["type"] in RECORDS and (known := _RECORDS.get(action["table"])) is not None:
        name, words = known
        for row in rows_of(action):
            record = record_of(TABLES[action["table"]], row)
            yield RunEvent(at_s, step, name, words(record), asdict(record))


def _data(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event without what is long, or nobody's business: the run file, the environment."""
    return {name: value for name, value in event.items() if name not in ("type", "attributes")}


# ---- in words


def _started(event: Mapping[str, Any]) -> str:
    host = event.get("attributes", {}).get("host", "")
    return f"a coordinator starts the run{f' on {host}' if host else ''}"


def _took_over(event: Mapping[str, Any]) -> str:
    return f"coordinator {event['epoch']} takes over on {event['host']}"


def _asked(event: Mapping[str, Any]) -> str:
    """As the command has it, without what it left out; worker 0 is one."""
    request = event["request"]
    given = {"worker" if name == "replace" else name: value for name, value in request.items()}
    command = given.pop("type").removesuffix("_run")
    said = [f"{k}={v}" for k, v in given.items() if v is not None and v is not False]
    return f"operator asks: {' '.join([command, *said])}"


def _written(event: Mapping[str, Any]) -> str:
    size, took = bytes_text(event["total_bytes"]), duration_text(event["took_s"])
    return f"checkpoint of step {event['step']}: {size} in {took}, {event['path']}"


def _reconfiguration(record: ReconfigurationRecord) -> str:
    ends = f"{layout_text(record.source)} to {layout_text(record.target)}"
    why = f"{ends} ({record.notice})"
    words = [f"handoff to generation {record.generation}, {why}: {record.outcome}"]
    if record.outcome == "completed":
        words.append(f"paused {_seconds(record.pause_s)}")
        words.append(f"moved {bytes_text(record.bytes_moved)}")
        words.append(f"{_seconds(record.first_step_ended_s - record.notice_s)} from its notice on")
    return ", ".join(words) + (f": {record.detail}" if record.detail else "")


def _recovery(record: RecoveryRecord) -> str:
    ends = f"{layout_text(record.source)} to {layout_text(record.target)}"
    took = _seconds(record.refilled_s - record.noticed_s)
    lost = f"lost workers {record.lost}" if record.lost else "lost no worker"
    return (
        f"recovery to generation {record.generation}, {ends}: {lost}; filled after {took}, "
        f"{record.steps_redone} steps are done again; {record.reason}"
    )


def _notice(record: NoticeRecord) -> str:
    about = f"node {record.node}, {record.kind}" if record.node else record.kind
    return f"{about}: {record.outcome}" + (f"; {record.action}" if record.action else "")


def _observation(record: ObservationRecord) -> str:
    ends = f"from {layout_text(record.source)} to {layout_text(record.target)}"
    return f"{WOULD_HAVE} gone {ends} ({record.notice}); {record.instead}"


def _straggler(record: StragglerRecord) -> str:
    return (
        f"node {record.node}{NAMED}{record.ratio:.1f} times as slow as others for "
        f"{record.for_s:.0f} s (worker {record.worker}, of {record.compared} nodes); "
        f"{record.action}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else duration_text(seconds) or NOTHING


_TOLD: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    COORDINATOR_STARTED: ("start", _started),
    "took_over": ("start", _took_over),
    "operator_asked": ("asked", _asked),
    "checkpoint_written": ("checkpoint", _written),
}
"""Events that are told themselves; of others what followed from them is."""
_RECORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "reconfigurations": ("reconfiguration", _reconfiguration),
    "recoveries": ("recovery", _recovery),
    "notices": ("notice", _notice),
    "observations": ("observation", _observation),
    "stragglers": ("straggler", _straggler),
}
