"""A directory of Megatron's checkpoints: what is loaded from it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from liver_hpc.config.megatron_checkpoint import (
    TRACKER_FILE,
    iteration_path,
    loaded_checkpoint,
    tracked_step,
    weights_checkpoint,
)
from liver_hpc.errors import CheckpointError

ABOUT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BEFORE_0_19 = ABOUT | {"common_backend": "torch", "common_backend_version": 1}


def checkpoint(directory: Path, step: int, *names: str, about: object = ABOUT) -> Path:
    path = iteration_path(directory, step)
    path.mkdir()
    for name in names:
        (path / name).write_text(json.dumps(about))
    (directory / TRACKER_FILE).write_text(f"{step}\n")
    return path


def test_the_tracked_one_is_loaded(tmp_path: Path) -> None:
    assert loaded_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 70, "metadata.json")
    path = checkpoint(tmp_path, 50, "metadata.json", ".metadata", "common.pt")
    assert path.name == "iter_0000050"
    assert loaded_checkpoint(tmp_path) == (50, path)


@pytest.mark.parametrize(
    ("names", "about", "why"),
    [
        (("mp_rank_00",), ABOUT, r"legacy format \(torch\)"),
        ((".metadata", "__0_0.distcp"), ABOUT, "torch_dcp or fsdp_dtensor"),
        ((), ABOUT, "no checkpoint: it lacks metadata.json"),
        (("metadata.json",), {"sharded_backend": "zarr", "sharded_backend_version": 1}, "zarr 1"),
        (("metadata.json",), [], "damaged"),
        (("metadata.json",), ABOUT, r"incomplete: it lacks \.metadata"),
        (("metadata.json", ".metadata"), BEFORE_0_19, "incomplete: it lacks common.pt"),
    ],
)
def test_another_format_is_refused_by_name(
    names: tuple[str, ...], about: object, why: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, 5, *names, about=about)
    with pytest.raises(CheckpointError, match=why):
        loaded_checkpoint(tmp_path)


def test_what_somebody_else_wrote_steers_no_terminal_and_begins_no_line_of_a_log(
    tmp_path: Path,
) -> None:
    backend = "\x1b]0;mine\x07\n12:00:00 INFO \ud800"
    path = checkpoint(tmp_path, 5, "metadata.json", about=ABOUT | {"sharded_backend": backend})
    with pytest.raises(CheckpointError) as raised:
        loaded_checkpoint(tmp_path)
    said = r"\x1b]0;mine\x07\n12:00:00 INFO \ud800 1"
    assert str(raised.value) == f"{path} is of the format {said}; wanted a torch_dist checkpoint"


def test_since_0_19_there_is_no_common_file(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5, "metadata.json", ".metadata")
    assert loaded_checkpoint(tmp_path) == (5, path)


@pytest.mark.parametrize(("text", "why"), [("release", "release"), ("5x", "wanted a step")])
def test_a_tracker_that_names_no_step_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / TRACKER_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=why):
        tracked_step(tmp_path)


def test_weights_are_those_of_the_tracked_one_or_of_a_release(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint: it lacks latest_check"):
        weights_checkpoint(tmp_path)
    path = checkpoint(tmp_path, 5, "metadata.json", ".metadata", "common.pt")
    assert weights_checkpoint(tmp_path) == path
    (tmp_path / TRACKER_FILE).write_text("release\n")
    with pytest.raises(CheckpointError, match="release cannot be read"):
        weights_checkpoint(tmp_path)
    path.rename(tmp_path / "release")
    assert weights_checkpoint(tmp_path) == tmp_path / "release"
    with pytest.raises(CheckpointError, match=r"checkpoint\.weights \(--finetune\)"):
        loaded_checkpoint(tmp_path)


def test_a_tracked_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / TRACKER_FILE).write_text("5")
    with pytest.raises(CheckpointError, match="iter_0000005 cannot be read"):
        loaded_checkpoint(tmp_path)
