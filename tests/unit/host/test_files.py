"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from liver_hpc.host.files import write_whole


@pytest.mark.parametrize("data", ["text \N{SNOWMAN}\n", b"\x00bytes"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_file_takes_the_place_of_another(tmp_path: Path, data: str | bytes, sync: bool) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    reader = path.open("rb")
    write_whole(path, data, mode=0o600, sync=sync)
    assert reader.read() == b"before", "whoever reads goes on reading what was there"
    assert path.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after", sync=True)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
