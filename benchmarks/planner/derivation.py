"""How long the spec of a large model takes to derive from the model itself, and how much memory."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

from benchmarks.planner.cases import MODEL
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.specs import derive_spec

LAYOUTS = {
    1024: [{"tp": 8, "pp": 16, "dp": 8}],
    2048: [{"tp": 8, "pp": 16, "dp": 16}, {"tp": 4, "pp": 16, "dp": 32}],
    3584: [{"tp": 8, "pp": 16, "dp": 28}, {"tp": 8, "pp": 8, "cp": 2, "dp": 28}],
    4032: [{"tp": 8, "pp": 9, "dp": 56, "vpp": 2}],
    4096: [
        {"tp": 8, "pp": 16, "dp": 32},
        {"tp": 8, "pp": 8, "cp": 2, "dp": 32},
    ],
}
"""Of a run that loses nodes, and comes to other shapes."""


class Derived(NamedTuple):
    """took_s: wall time, the start of the child included. peak_bytes: of its resident memory."""

    spec: ModelSpec
    took_s: float
    peak_bytes: int


def derived() -> Derived:
    """Derives it as `liver submit` does, in a child of its own."""
    model = MODEL.model_dump(mode="json", exclude_defaults=True)
    config = RunConfig.model_validate(
        {
            "model": model,
            "data": {"prefix": "none"},
            "train": {"steps": 1, "global_batch": 8192},
            "workers": {"initial": 4096, "max": 4096},
            "layouts": LAYOUTS,
            "deadlines": {"boot_s": 600.0},
        }
    )
    began_s = time.monotonic()
    spec = derive_spec(config)
    took_s = time.monotonic() - began_s
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Derived(spec, took_s, peak_kib * 1024)
