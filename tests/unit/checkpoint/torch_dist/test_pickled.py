"""What others have pickled is read, and not run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_hpc.checkpoint.torch_dist.pickled import StandIn, torch_loaded, unpickled
from liver_hpc.errors import CheckpointError


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_what_a_pickle_would_run_is_not_run(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "pickle"
    file.write_bytes(pickle.dumps({"a": Runs(made), "b": 1}))
    found = unpickled(file)
    assert found["b"] == 1
    assert isinstance(found["a"], StandIn)
    assert not made.exists()


def test_arguments_are_read_whatever_classes_they_have(tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    args = argparse.Namespace(layers=4, path=Runs(tmp_path / "made"), betas=(0.9, 0.95))
    torch.save({"args": args, "step": torch.tensor(3.0), "dtype": torch.bfloat16}, file)
    with file.open("rb") as stream:
        found = torch_loaded(stream)
    assert (found["args"].layers, found["args"].betas) == (4, (0.9, 0.95))
    assert isinstance(found["args"].path, StandIn)
    assert (found["step"], found["dtype"]) == (3.0, torch.bfloat16)
    assert not (tmp_path / "made").exists()


def test_torchscript_is_not_run() -> None:
    """torch.load would hand such an archive on, past our unpickler."""

    class Adds(torch.nn.Module):
        def forward(self, one: torch.Tensor) -> torch.Tensor:
            return one + 1

    archive = io.BytesIO()
    torch.jit.save(torch.jit.script(Adds()), archive)
    archive.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="TorchScript"):
        torch_loaded(archive)


def test_a_damaged_pickle_is_named(tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(b"\x80\x04no")
    with pytest.raises(CheckpointError, match=r"/\.metadata cannot be read"):
        unpickled(file)
