"""The tables beside the parser of a real checkout: MEGATRON_LM=PATH, of any release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.recipes.megatron_lm.arguments import derived_from, schedule_to_load
from liver_hpc.recipes.megatron_lm.judgement import entry_of
from liver_hpc.recipes.megatron_lm.tables import PASSED
from tests.unit.recipes.megatron_lm import megatron_parser
from tests.unit.recipes.megatron_lm.jobs import JOB

CHECKOUT = os.environ.get("MEGATRON_LM", "")

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM"),
    pytest.mark.timeout(120),
]

SAMPLES = JOB.replace("--train-iters 1000", "--train-samples 8100")
JOBS = [
    f"{JOB} --lr-warmup-fraction 0.013 --lr-decay-iters 777 --bf16 --swiglu --eval-interval 10",
    f"{SAMPLES} --lr-warmup-samples 100 --lr-decay-style cosine --weight-decay 0.1 "
    "--lr-warmup-init 1e-5 --bf16 --grad-reduce-in-bf16 --decoupled-lr 2e-4",
]


def of_megatron(job: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": CHECKOUT, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(Path(megatron_parser.__file__)), *job.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("job", JOBS)
def test_megatron_makes_the_same_of_a_job(job: str) -> None:
    found = of_megatron(job)
    assert (found["judged"], found["agreement"]) == ([], [])
    assert found["schedule"].items() >= schedule_to_load(job.split()).items()
    init = derived_from(job.split())["schedule", "warmup_init"]
    assert found["schedule"]["init_lr"] == init.value
    assert unjudged(found["options"]) == []


def unjudged(options: list[tuple[str, list[str]]]) -> list[str]:
    """Options that no table names, and words that mean another option than the parser says."""
    wrong = [name for name, _ in options if entry_of(name) is None]
    for name, words in options:
        meant = entry_of(name)
        for word in words:
            found = entry_of(word.lstrip("-").replace("-", "_"))
            passed = meant is not None and meant.group in PASSED
            if found is not meant and not (passed and (found is None or found.group in PASSED)):
                both = found is not None and meant is not None and found.group is meant.group
                wrong += [] if both else [word]
    return wrong
