"""A state through the files and back, in other layouts; files that are not what they should be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import h5py
import psutil
import pytest
import torch

from liver_hpc.checkpoint.hdf5 import BoxesReader, BoxesWriter
from liver_hpc.checkpoint.index import INDEX_FILE, SavedModel, part_name, read_index
from liver_hpc.checkpoint.parts import read_parts, reads, write_part
from liver_hpc.coordinator.checkpoints import newest_checkpoint
from liver_hpc.errors import CheckpointError, PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec
from liver_hpc.protocol.messages import Restored
from liver_hpc.run.events import ShellFailed
from tests.unit.checkpoint.disk import (
    Disk,
    digests_of,
    empty,
    filled,
    restored_rank_map,
    scalar_state,
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
            read_parts(state, checkpoint.index, checkpoint.path)
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
    model = dataclasses.replace(TIED.only(layout), tensors=tuple(unsplit))
    for at in layout.coordinates():
        state, wanted = empty(model, layout, at), filled(model, layout, at)
        read_parts(state, checkpoint.index, checkpoint.path)
        for kind in model.kinds:
            for index, box in state.boxes(kind):
                assert torch.equal(state.view(kind, index, box), wanted.view(kind, index, box))


def test_a_tensor_that_is_another_matrix_by_the_runs_spec_is_named(tmp_path: Path) -> None:
    disk = Disk(TIED, tmp_path)
    disk.save(Layout(1, 1, 1), 4)
    index = read_index(disk.directory / "step-00000004")
    first, *others = TIED.tensors
    deep = dataclasses.replace(first, shape=(5, 8, 16), tp_dim=None, tp_blocks=())
    assert index.spec is not None
    split = dataclasses.replace(deep, tp_dim=2, tp_blocks=(16,))
    saved = dataclasses.replace(index.spec, tensors=(split, *others))
    model = dataclasses.replace(TIED, tensors=(deep, *others))
    with pytest.raises(PlanError, match=r"word_embeddings.* saved as a matrix of \(40, 16\)"):
        reads(model, Layout(1, 1, 1), Layout(1, 1, 1), ONE, saved)


def test_a_checkpoint_of_before_specs_were_saved_is_read(tmp_path: Path) -> None:
    disk, layout = Disk(TIED, tmp_path), Layout(1, 2, 1)
    disk.save(Layout(2, 1, 2), 4)
    path = disk.directory / "step-00000004"
    old = json.loads((path / INDEX_FILE).read_text())
    del old["spec"]
    for tensor in old["model"]["tensors"]:
        del tensor["role"]
    (path / INDEX_FILE).write_text(json.dumps(old))
    state, wanted = empty(TIED, layout, ONE), filled(TIED, layout, ONE)
    read_parts(state, read_index(path), path)
    assert digests_of(state) == digests_of(wanted)


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
    with BoxesWriter(tmp_path / "part.h5", {}) as file:
        file.write("a/box", written)
    read = torch.zeros((3, 4), dtype=kind)
    with BoxesReader(tmp_path / "part.h5") as file:
        file.read("a/box", Box(0, 3, 0, 4), Box(0, 3, 0, 4), read)
    assert torch.equal(read.view(torch.uint8), written.view(torch.uint8))


def test_each_element_is_on_the_disk_once(tmp_path: Path) -> None:
    """Of parameters and both moments, in contiguous datasets."""
    disk = Disk(TIED, tmp_path)
    disk.save(Layout(2, 2, 3), 4)
    datasets = 0
    elements = 0

    def count(_: str, item: object) -> None:
        nonlocal datasets, elements
        if isinstance(item, h5py.Dataset):
            assert item.chunks is None
            datasets, elements = datasets + 1, elements + item.size

    for path in (disk.directory / "step-00000004").glob("*.h5"):
        with h5py.File(path) as file:
            file.visititems(count)
    assert datasets > 3 * len(TIED.tensors)
    assert elements == 3 * sum(tensor.elements for tensor in TIED.tensors)


def test_a_state_that_was_written_can_still_be_released(tmp_path: Path) -> None:
    state = filled(TIED, Layout(1, 1, 1), ONE)
    write_part(state, 4, tmp_path)
    state.release()


FULL = """
import resource, signal, sys
from pathlib import Path
from liver_hpc.checkpoint.parts import write_part
from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.unit.checkpoint.disk import filled
from tests.unit.layout.models import TIED

state = filled(TIED, Layout(1, 1, 1), Coordinate(0, 0, 0))
whole = write_part(state, 4, Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for share in range(12):
    most = whole.num_bytes * share // 12
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
    """Many times in one process, which must then end as it should: HDF5 is known to crash."""
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["refused"] * 12


def saved_at_two(tmp_path: Path) -> tuple[Disk, Path]:
    disk = Disk(TIED, tmp_path)
    disk.save(Layout(2, 1, 1), 4)
    return disk, disk.directory / "step-00000004"


def read_all(path: Path, model: ModelSpec = TIED) -> None:
    read_parts(empty(model, Layout(1, 1, 1), ONE), read_index(path), path)


def test_another_model_is_refused_by_worker_and_coordinator(tmp_path: Path) -> None:
    disk, path = saved_at_two(tmp_path)
    first, *rest = TIED.tensors
    wider = dataclasses.replace(first, shape=(first.rows + 8, first.cols))
    other = dataclasses.replace(TIED, tensors=(wider, *rest))
    wanted = r"step-00000004 is of another model: '.*' is \(40, 16\) in it, \(48, 16\) in the run's"
    with pytest.raises(CheckpointError, match=wanted):
        read_all(path, other)
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
    with pytest.raises(CheckpointError, match=rf"rank-00001.h5 is {len(whole) - 1} bytes long"):
        disk.checkpoints.open()
    part.write_bytes(b"\0" * len(whole))
    with pytest.raises(CheckpointError, match=r"rank-00001.h5 cannot be read"):
        read_all(path)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001.h5 is missing.*no earlier checkpoint"):
        disk.checkpoints.open()


def test_a_dataset_that_is_missing_or_of_another_type_is_named(tmp_path: Path) -> None:
    _, path = saved_at_two(tmp_path)
    with h5py.File(path / part_name(0), "r+") as file:
        name = "exp_avg/decoder.final_layernorm.weight/0:16,0:1"
        del file[name]
    with pytest.raises(CheckpointError, match=f"rank-00000.h5 lacks {name}"):
        read_all(path)
    with BoxesReader(path / part_name(0)) as file:
        name, box = "parameter/decoder.final_layernorm.weight/0:16,0:1", Box(0, 16, 0, 1)
        with pytest.raises(CheckpointError, match=r"of float32, wanted .* of bfloat16"):
            file.read(name, box, box, torch.zeros(16, 1, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 2)], ids=str)
def test_a_corrupted_byte_is_refused_by_digest_and_its_file_is_named(
    tmp_path: Path, layout: Layout
) -> None:
    """The byte is in the data: HDF5 itself notices nothing."""
    _, path = saved_at_two(tmp_path)
    part = path / part_name(1)
    with h5py.File(part) as file:
        group = file["exp_avg/decoder.layers.2.mlp.linear_fc1.weight"]
        dataset = next(iter(group.values()))
        place = dataset.id.get_offset() + 9
    data = bytearray(part.read_bytes())
    data[place] ^= 1
    part.write_bytes(data)
    later = Disk(TIED, tmp_path).checkpoints
    assert later.open() is not None
    rank_map = restored_rank_map(layout)
    messages = []
    for at in layout.coordinates():
        state = empty(TIED, layout, at)
        read_parts(state, read_index(path), path)
        messages.append(
            Restored(
                worker=rank_map.worker_at(at),
                generation=0,
                scalars=scalar_state(4),
                digests=digests_of(state),
            )
        )
    *early, last = messages
    assert [later.restored(message, rank_map) for message in early] == [None] * len(early)
    refused = later.restored(last, rank_map)
    assert isinstance(refused, ShellFailed)
    assert "not what was saved: exp_avg (split over tp): " in refused.reason
    assert f"{part} has changed on the disk" in refused.reason
    assert "rank-00000" not in refused.reason


def test_what_is_written_does_not_stay_in_memory(tmp_path: Path) -> None:
    """HDF5's small allocations must not keep what the copies of boxes have had of the heap."""
    box = torch.rand(1600, 1024)
    before = psutil.Process().memory_info().rss
    with BoxesWriter(tmp_path / "rank.h5", {"step": 1}) as file:
        for number in range(40):
            file.write(f"parameter/{number}/0:1600,0:1024", box)
        grown_bytes = psutil.Process().memory_info().rss - before
    assert grown_bytes < 10 * box.nbytes  # of 40
