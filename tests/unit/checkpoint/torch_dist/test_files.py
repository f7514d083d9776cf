"""What is in no tensor of a torch_dist checkpoint, wherever a release of Megatron has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.torch_dist.files import (
    RankWriter,
    rank_lists,
    read_common,
    read_table,
    write_common,
    write_table,
)
from liver_hpc.errors import CheckpointError

STATE = {"iteration": 7, "checkpoint_version": 3.0}
WRITES = """
import pathlib, sys, torch
from liver_hpc.checkpoint.torch_dist.files import RankWriter, write_common, write_table, rank_lists
path, before = pathlib.Path(sys.argv[1]), {*sys.modules}
with RankWriter(path, 0) as file:
    file.add_object("state", [torch.zeros(2)])
write_table(path, rank_lists(path, 1))
write_common(path, {})
print({*sys.modules} - before)
"""


def written(path: Path, **objects: Any) -> Path:
    with RankWriter(path, 0) as file:
        for name, value in objects.items():
            file.add_object(f"{name}/shard_0_1", value)
    write_table(path, rank_lists(path, 1))
    return path


def common_of(path: Path) -> dict[str, Any]:
    return read_common(path, read_table(path))


def test_it_is_an_object_since_0_19(tmp_path: Path) -> None:
    assert common_of(written(tmp_path, rng_state=[], common_state=STATE)) == STATE


def test_it_is_a_file_before_which_later_releases_prefer_too(tmp_path: Path) -> None:
    write_common(written(tmp_path, common_state={"iteration": 8}), STATE)
    assert common_of(tmp_path) == STATE


def test_a_checkpoint_without_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be read: No such file"):
        common_of(written(tmp_path, rng_state=[]))


def test_what_is_no_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp holds a float, wanted a dict"):
        common_of(written(tmp_path, common_state=1.5))


def test_one_is_written_also_where_what_is_installed_has_gone(tmp_path: Path) -> None:
    """Or is being replaced, hours after a worker has imported what it is made of."""
    words = [sys.executable, "-c", WRITES, str(tmp_path)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "set()\n"
