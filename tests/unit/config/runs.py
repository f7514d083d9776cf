"""Run files for the tests of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from liver_hpc.config.schema import RunConfig

MINIMAL: dict[str, Any] = {
    "recipe": "tests.integration.random_tokens:RandomTokenGPT",  # needs no data
    "cluster": {"kind": "local"},
    "train": {"steps": 10, "global_batch": 8},
    "workers": {"initial": 2, "max": 4},
    "layouts": {2: [{"dp": 2}, {"tp": 2}], 4: [{"tp": 2, "dp": 2}]},
}


def write(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def write_minimal(directory: Path, **sections: Any) -> Path:
    """A run file that is right, with sections replaced or added."""
    return write(directory, yaml.safe_dump({**MINIMAL, **sections}, sort_keys=False))


def minimal(**sections: Any) -> RunConfig:
    """The same as an object."""
    return RunConfig.model_validate({**MINIMAL, **sections})
