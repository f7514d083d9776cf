"""A state through the files and back, in other layouts; files that are not what they should be."""

from __future__ import annotations

import dataclasses
import errno
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from liver_hpc.checkpoint.index import SavedModel, part_name
from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.checkpoint.parts import restore
from liver_hpc.checkpoint.torch_dist.files import (
    Place,
    RankWriter,
    Reader,
    rank_lists,
    read_table,
    write_table,
)
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.protocol.messages import Restored
from liver_hpc.run.events import ShellFailed
from tests.unit.checkpoint.disk import (
    Disk,
    digests_of,
    empty,
    filled,
    read_state,
    restore_part,
    restored_rank_map,
    scalar_state,
    write_part,
)
from tests.unit.layout.models import TIED, UNTIED_BF16

LAYOUTS = [Layout(1, 1, 1), Layout(2, 1, 2), Layout(1, 2, 3), Layout(2, 4, 1)]
ONE = Coordinate(0, 0, 0)


@pytest.mark.parametrize("model", [TIED, UNTIED_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_a_state_comes_back_bit_equal_in_every_layout(
    tmp_path: Path, model: ModelSpec, saved: Layout
) -> None:
    disk = Disk(model, tmp_path)
    disk.save(saved, 4)
    checkpoint = newest_checkpoint(disk.directory)
    assert checkpoint is not None
    for layout in LAYOUTS:
        for at in layout.coordinates():
            state, wanted = empty(model, layout, at), filled(model, layout, at)
            read_state(state, checkpoint.path)
            for kind in (PARAMETER, *model.optimizer_kinds):
                for index, box in state.boxes(kind):
                    assert torch.equal(state.view(kind, index, box), wanted.view(kind, index, box))


def test_a_state_comes_back_by_the_spec_of_a_run_with_other_layouts(tmp_path: Path) -> None:
    """A run's spec knows the splits and stages of its own layouts alone."""
    disk, layout = Disk(TIED, tmp_path), Layout(1, 1, 2)
    disk.save(Layout(2, 2, 1), 4)
    checkpoint = newest_checkpoint(disk.directory)
    assert checkpoint is not None
    unsplit = [
        dataclasses.replace(tensor, tp_dim=None, tp_blocks=(), tied=False)
        for tensor in TIED.tensors
    ]
    model = dataclasses.replace(TIED, tensors=tuple(unsplit))
    for at in layout.coordinates():
        state, wanted = empty(model, layout, at), filled(model, layout, at)
        read_state(state, checkpoint.path)
        for kind in model.kinds:
            for index, box in state.boxes(kind):
                assert torch.equal(state.view(kind, index, box), wanted.view(kind, index, box))


def test_a_tensor_with_another_role_is_of_another_model(tmp_path: Path) -> None:
    first, *others = TIED.tensors
    frozen = dataclasses.replace(TIED, tensors=(dataclasses.replace(first, role="frozen"), *others))
    difference = SavedModel.of(frozen).difference(SavedModel.of(TIED))
    assert difference == f"{first.name!r} is frozen in it, trained in the run's model"


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"],
)
def test_elements_of_every_dtype_come_back(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    written = torch.randint(0, 2, (3, 4), dtype=torch.uint8).to(kind)
    with RankWriter(tmp_path, 0) as file:
        file.add(["a"], (3, 4), ((0, 3), (0, 4)), written)
    write_table(tmp_path, rank_lists(tmp_path, 1))
    saved = read_table(tmp_path).tensors["a"]
    assert saved.dtype == dtype
    with Reader(tmp_path) as reader:
        ((_, place),) = saved.chunks
        read = reader.read(place)
    assert torch.equal(read.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_is_not_given_for_a_moment_is_read_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankWriter(tmp_path, 0) as file:
        file.add(["a"], (2,), ((0, 2),), torch.ones(2))
    write_table(tmp_path, rank_lists(tmp_path, 1))
    ((_, place),) = read_table(tmp_path).tensors["a"].chunks
    opens, stale = Path.open, [OSError(errno.ESTALE, "Stale file handle")] * times

    def opened(path: Path, *args: Any) -> Any:
        if path.name == place.file and stale:
            raise stale.pop()
        return opens(path, *args)

    monkeypatch.setattr(Path, "open", opened)
    with Reader(tmp_path) as reader:
        if times > 1:
            with pytest.raises(CheckpointError, match=f"{place.file}.*Stale file handle"):
                reader.read(place)
        assert torch.equal(reader.read(place), torch.ones(2))


def test_each_element_is_on_the_disk_once(tmp_path: Path) -> None:
    """Of parameters and both moments; where parameters are in fp32 they are the main ones, too."""
    disk = Disk(TIED, tmp_path)
    disk.save(Layout(2, 2, 3), 4)
    places: dict[Place, int] = {}
    for saved in read_table(disk.directory / "iter_0000004").tensors.values():
        places |= {place: math.prod(size for _, size in box) for box, place in saved.chunks}
    assert len(places) > 3 * len(TIED.tensors)
    assert sum(places.values()) == 3 * sum(tensor.elements for tensor in TIED.tensors)


def test_a_state_that_was_written_can_still_be_released(tmp_path: Path) -> None:
    state = filled(TIED, Layout(1, 1, 1), ONE)
    write_part(state, 4, tmp_path)
    state.release()


FULL = """
import resource, signal, sys
from pathlib import Path
import tests.megatron_first
from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.unit.checkpoint.disk import filled, write_part
from tests.unit.layout.models import TIED

state = filled(TIED, Layout(1, 1, 1), Coordinate(0, 0, 0))
whole = write_part(state, 4, Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for share in range(6):
    most = whole.num_bytes * share // 6
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        write_part(state, 4, Path(sys.argv[1]))
    except OSError as error:
        assert error.strerror == "File too large", error
        print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert write_part(state, 4, Path(sys.argv[1])).num_bytes == whole.num_bytes
"""


def test_a_disk_that_is_full_anywhere_in_the_file_raises_and_hurts_nobody(tmp_path: Path) -> None:
    """Many times in one process, which must then end as it should."""
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    assert done.stdout.split() == ["refused"] * 6


def saved_at_two(tmp_path: Path) -> tuple[Disk, Path]:
    disk = Disk(TIED, tmp_path)
    disk.save(Layout(2, 1, 1), 4)
    return disk, disk.directory / "iter_0000004"


def read_all(path: Path, model: ModelSpec = TIED) -> None:
    read_state(empty(model, Layout(1, 1, 1), ONE), path)


def test_another_model_is_refused_by_worker_and_coordinator(tmp_path: Path) -> None:
    disk, path = saved_at_two(tmp_path)
    first, *rest = TIED.tensors
    wider = dataclasses.replace(first, shape=(first.rows + 8, first.cols))
    other = dataclasses.replace(TIED, tensors=(wider, *rest))
    wanted = r"iter_0000004 is of another model: '.*' is \(40, 16\) in it, \(48, 16\) in the run's"
    world: Any = SimpleNamespace(recipe=SimpleNamespace(spec=other))
    with pytest.raises(CheckpointError, match=wanted):
        restore(world, path)
    with pytest.raises(CheckpointError, match=wanted):
        Disk(other, tmp_path).checkpoints.open()
    whole = {"pp1": ((tuple(range(len(rest))),),)}
    fewer = dataclasses.replace(TIED, tensors=tuple(rest), stages=whole, homes={})
    with pytest.raises(CheckpointError, match="which the run's model lacks"):
        Disk(fewer, tmp_path).checkpoints.open()
    with pytest.raises(CheckpointError, match="have 4 bytes, those of the run's model 2"):
        Disk(dataclasses.replace(TIED, parameter_bytes=2), tmp_path).checkpoints.open()
    assert disk.checkpoints.open() is not None


def test_a_file_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    disk, path = saved_at_two(tmp_path)
    part = path / part_name(1)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"__1_0.distcp is {len(whole) - 1} bytes long"):
        disk.checkpoints.open()
    part.write_bytes(b"\0" * len(whole))
    with pytest.raises(CheckpointError, match=r"__1_0.distcp cannot be read"):
        read_all(path)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is missing.*no earlier checkpoint"):
        disk.checkpoints.open()


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 2)], ids=str)
def test_a_corrupted_byte_is_refused_by_digest_and_its_file_is_named(
    tmp_path: Path, layout: Layout
) -> None:
    """The byte is in the data: torch itself notices nothing."""
    _, path = saved_at_two(tmp_path)
    part = path / part_name(1)
    key = "optimizer.state.exp_avg.decoder.layers.2.mlp.linear_fc1.weight"
    chunks = read_table(path).tensors[key].chunks
    place = next(place for _, place in chunks if place.file == part.name)
    with Reader(path) as reader:
        value = reader.read(place).numpy().tobytes()
    data = bytearray(part.read_bytes())
    data[data.index(value, place.start) + 9] ^= 1
    part.write_bytes(data)
    later = Disk(TIED, tmp_path).checkpoints
    assert later.open() is not None
    rank_map = restored_rank_map(layout)
    messages = []
    for at in layout.coordinates():
        state = empty(TIED, layout, at)
        read_state(state, path)
        messages.append(
            Restored(
                worker=rank_map.worker_at(at),
                generation=0,
                scalars=scalar_state(4),
                digests=digests_of(state),
            )
        )
    *early, last = messages
    assert [restore_part(later, message, rank_map) for message in early] == [None] * len(early)
    refused = restore_part(later, last, rank_map)
    assert isinstance(refused, ShellFailed)
    assert "not what was saved: exp_avg (split over tp): " in refused.reason
    assert f"{part} has changed on the disk" in refused.reason
    assert "__0_0" not in refused.reason


def test_what_is_written_does_not_stay_in_memory(tmp_path: Path) -> None:
    """What is small and stays must not keep what the copies of boxes have had of the heap."""
    box = torch.rand(1600, 1024)
    before = psutil.Process().memory_info().rss
    with RankWriter(tmp_path, 0) as file:
        for number in range(40):
            file.add([str(number)], (1600, 1024), ((0, 1600), (0, 1024)), box)
        grown_bytes = psutil.Process().memory_info().rss - before
    assert grown_bytes < 10 * box.nbytes  # of 40
