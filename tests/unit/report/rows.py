"""Records with plausible figures, of which a test names only those that matter to it."""

from __future__ import annotations

import math
from typing import Any

from liver_hpc.run.records import (
    BaselineRecord,
    CrossingRecord,
    EvaluationRecord,
    ReconfigurationRecord,
    RecoveryRecord,
    StepRecord,
    StragglerRecord,
)


def step(number: int, **fields: Any) -> StepRecord:
    """Step `number`: one second long, undisturbed, of generation 0."""
    start_s = fields.pop("started_s", 100.0 + number)
    values: dict[str, Any] = {
        "step": number,
        "generation": 0,
        "loss": 4.0 - number / 100,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 512,
        "started_s": start_s,
        "ended_s": start_s + fields.pop("took_s", 1.0),
        "phase": "",
    }
    return StepRecord(**values | fields)


def evaluation(**fields: Any) -> EvaluationRecord:
    """A quarter of a second long, as the step after it begins."""
    start_s = fields.pop("started_s", 100.0 + fields["step"])
    values = {"generation": 0, "loss": 4.25, "batches": 2}
    return EvaluationRecord(**values | fields, started_s=start_s, ended_s=start_s + 0.25)


def reconfiguration(**fields: Any) -> ReconfigurationRecord:
    """An attempt to reach generation 1 that is over before anything has happened."""
    values: dict[str, Any] = {
        "generation": 1,
        "source_generation": 0,
        "source": "tp1 pp1 dp2",
        "target": "tp2 pp1 dp2",
        "source_workers": "0,1",
        "target_workers": "0,2,1,3",
        "notice": "resize to tp2 pp1 dp2 (operator)",
        "outcome": "completed",
        "detail": "",
        "step": 4,
        "digest_equal": True,
        "bytes_moved": 3_000_000,
        "bytes_local": 1_000_000,
        "notice_s": 100.0,
        "stayers_file_descriptors": 31,
        "stayers_resident_bytes": 2**29,
        "bytes_between_nodes": 2_000_000,
        "spares": 0,
    }
    values["began_s"] = fields.get("notice_s", values["notice_s"])
    missing = ReconfigurationRecord.__dataclass_fields__.keys() - values.keys()
    return ReconfigurationRecord(**dict.fromkeys(missing, math.nan) | values | fields)


def recovery(**fields: Any) -> RecoveryRecord:
    """Generation 3, which took the place of generation 2 after worker 1 was lost."""
    values: dict[str, Any] = {
        "generation": 3,
        "source_generation": 2,
        "source": "tp1 pp1 dp2",
        "target": "tp1 pp1 dp1",
        "lost": "1",
        "reason": "worker 1 lost: signal 9",
        "step": 4,
        "steps_redone": 1,
        "rounds": 1,
        "noticed_s": 110.0,
        "halted_s": 110.25,
        "refilled_s": 111.0,
    }
    return RecoveryRecord(**values | fields)


def crossing(**fields: Any) -> CrossingRecord:
    """Of worker 0 to generation 1; what is not given it did not say."""
    missing = CrossingRecord.__dataclass_fields__.keys()
    known: dict[str, Any] = {"generation": 1, "worker": 0, "voted_s": 0.0}
    return CrossingRecord(**dict.fromkeys(missing, math.nan) | known | fields)


def baseline(**fields: Any) -> BaselineRecord:
    values: dict[str, Any] = {
        "method": "dist_checkpointing",
        "source": "tp1 pp1 dp2",
        "target": "tp2 pp1 dp2",
        "save_s": 1.0,
        "stop_s": 0.5,
        "launch_s": 2.0,
        "import_s": 4.0,
        "groups_s": 0.25,
        "load_s": 1.5,
        "first_step_s": 0.75,
        "total_s": 10.0,
        "detail": "",
        "lost_s": 9.0,
    }
    return BaselineRecord(**values | fields)


def straggler(node: str, **values: Any) -> StragglerRecord:
    known: dict[str, Any] = {"at_s": 100.0, "step": 60, "generation": 0, "node": node, "worker": 5}
    known |= {"ratio": 1.84, "for_s": 61.0, "compared": 4, "action": "drained"}
    return StragglerRecord(**{**known, **values})
