"""What is read of a checkpoint whose vocabulary is padded otherwise, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from liver_hpc.checkpoint.torch_dist.contents import CONTENT, Contents
from liver_hpc.checkpoint.torch_dist.files import Place, Table, Tensor
from liver_hpc.checkpoint.torch_dist.places import elements
from liver_hpc.checkpoint.torch_dist.reads import Source
from liver_hpc.config.schema import RampupSection, TrainSection
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import ModelSpec, TensorSpec
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.world.sharded import NBox, Sharded, intersection

ROWS, COLS = 12, 4
MODEL = ModelSpec((TensorSpec("words", (ROWS, COLS), tp_dim=0),), {"pp1": (((0,),),)}, 4)
PIECES = {
    "words": (Sharded(((0, ROWS), (0, COLS)), "w", (ROWS, COLS), ((0, ROWS), (0, COLS)), True),)
}
LIKE = ScalarState(step=0, consumed_samples=0, optimizer_step=0, loss_scale=1.0, seed=1)
HERE, AT = Layout(1, 1, 1), Coordinate(0, 0, 0)


def contents(rows: int, dtype: str = "float32", samples: int = 40) -> Contents:
    """A checkpoint with so many words, in two chunks, whose optimizer's state is in model space."""
    half = rows // 2
    tensors = {}
    for number, prefix in enumerate(
        ("", *(f"optimizer.state.{k}." for k in ("exp_avg", "exp_avg_sq")))
    ):
        chunks = tuple(
            (((at, half), (0, COLS)), Place(f"__{number}_0.distcp", at, 1)) for at in (0, half)
        )
        tensors[f"{prefix}w"] = Tensor((rows, COLS), dtype, chunks)
    return Contents(Path("saved"), Table(tensors, {}), CONTENT, 5, samples, 5, {}, {})


@pytest.mark.parametrize(("rows", "zeros"), [(8, 4), (12, 0), (16, 0)])
def test_padding_that_the_checkpoint_lacks_is_zero(rows: int, zeros: int) -> None:
    reads = Source(contents(rows), MODEL, PIECES).reads(HERE, AT)
    lacking = [read for read in reads if read.place is None]
    found = [(read.place, read) for read in reads if read.place is not None]
    assert sum(elements(read.part.within) for read in lacking) == 3 * zeros * COLS
    assert sum(elements(read.part.within) for _, read in found) == 3 * (ROWS - zeros) * COLS
    assert found == sorted(found)
    for place, read in found:
        first = place.start + read.source.within[0][0]
        assert read.part.within[0][0] + read.box.row0 == first


@pytest.mark.parametrize("experts", [4, 64])
def test_an_expert_is_looked_for_among_its_own_chunks(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts of all layers are one tensor of the checkpoint, with a chunk for each share."""
    calls: list[object] = []

    def counted(one: NBox, other: NBox) -> NBox | None:
        calls.append(one)
        return intersection(one, other)

    monkeypatch.setattr("liver_hpc.checkpoint.torch_dist.reads.intersection", counted)
    rows, names = (0, ROWS), [f"expert{number}" for number in range(experts)]
    model = ModelSpec(
        tuple(TensorSpec(name, (ROWS, COLS), tp_dim=0) for name in names),
        {"pp1": ((tuple(range(experts)),),)},
        4,
    )
    shape, half = (experts, ROWS, COLS), ROWS // 2
    pieces = {
        name: (Sharded((rows, (0, COLS)), "w", shape, ((at, 1), rows, (0, COLS)), False),)
        for at, name in enumerate(names)
    }
    chunks = tuple(
        (((at, 1), (row, half), (0, COLS)), Place("__0_0.distcp", 2 * at + row, 1))
        for at in range(experts)
        for row in (0, half)
    )
    prefixes = ("", *(f"optimizer.state.{k}." for k in ("exp_avg", "exp_avg_sq")))
    table = Table({f"{p}w": Tensor(shape, "float32", chunks) for p in prefixes}, {})
    held = replace(contents(ROWS), table=table)
    reads = Source(held, model, pieces).reads(HERE, AT)
    assert sum(elements(read.part.within) for read in reads) == 3 * experts * ROWS * COLS
    assert len(calls) == 3 * experts * 2


def test_another_shape_is_refused_by_name() -> None:
    piece = PIECES["words"][0]._replace(padded=False)
    with pytest.raises(CheckpointError, match=r"'w' is \(16, 4\) in it, \(12, 4\) in the run"):
        Source(contents(16), MODEL, {"words": (piece,)})


def test_another_precision_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="parameter of 'words' is bfloat16 in it, float32"):
        Source(contents(12, "bfloat16"), MODEL, PIECES)


@pytest.mark.parametrize(
    ("dtype", "element_bytes", "fault"),
    [
        ("uint8", 1, ""),
        ("bool", 1, ""),
        ("float16", 2, ""),
        ("int32", 4, ""),
        ("float64", 8, ""),
        ("float64", 4, "parameter of 'words' is float64 in it, of 4 bytes an element"),
    ],
)
def test_a_frozen_parameter_may_have_any_precision(
    dtype: str, element_bytes: int, fault: str
) -> None:
    words = TensorSpec("words", (ROWS, COLS), tp_dim=0, role="frozen", element_bytes=element_bytes)
    model = replace(MODEL, tensors=(words,))
    if not fault:
        reads = Source(contents(12, dtype), model, PIECES).reads(HERE, AT)
        assert {read.kind for read in reads} == {"parameter"}
        return
    with pytest.raises(CheckpointError, match=fault):
        Source(contents(12, dtype), model, PIECES)


def test_a_parameter_with_two_names_is_read_once() -> None:
    (piece,) = PIECES["words"]
    saved = contents(12)
    tensors = saved.table.tensors
    table = Table({**tensors, **{key[:-1] + "v": t for key, t in tensors.items()}}, {})
    twice = {"words": (piece, piece._replace(key="v"))}
    reads = Source(replace(saved, table=table), MODEL, twice).reads(HERE, AT)
    assert sum(elements(read.part.within) for read in reads) == 3 * ROWS * COLS


def test_what_is_lacking_is_named() -> None:
    saved = contents(12)
    table = Table({key: t for key, t in saved.table.tensors.items() if "sq" not in key}, {})
    with pytest.raises(CheckpointError, match=r"lacks 'optimizer.state.exp_avg_sq.w'"):
        Source(replace(saved, table=table), MODEL, PIECES)
    words = saved.table.tensors["w"]
    holed = Table({**saved.table.tensors, "w": replace(words, chunks=words.chunks[:1])}, {})
    with pytest.raises(CheckpointError, match="holds 24 of the 48 elements of parameter"):
        Source(replace(saved, table=holed), MODEL, PIECES).reads(HERE, AT)


def test_another_schedule_is_refused_by_its_keys() -> None:
    saved = replace(contents(12), schedule={"max_lr": 1e-3, "lr_decay_steps": 80, "num_steps": 8})
    saved.check_schedule({"max_lr": 1e-3, "lr_decay_steps": 80.0, "start_wd": 0.1})
    with pytest.raises(CheckpointError, match="lr_decay_steps 80, wanted 160; max_lr ") as error:
        saved.check_schedule({"lr_decay_steps": 160, "max_lr": 2e-3})
    assert "write its values into the arguments; with --override-opt-param-" in str(error.value)


def test_a_batch_with_other_samples_is_refused() -> None:
    contents(12).check_samples(TrainSection(steps=10, global_batch=8))
    with pytest.raises(
        CheckpointError, match="global_batch of 4 takes 20 samples; it has consumed 40"
    ):
        contents(12).check_samples(TrainSection(steps=10, global_batch=4))


def test_the_samples_of_a_ramp_up_are_counted() -> None:
    """Of step 5: 4 4 8 12 16."""
    ramp = RampupSection(start=4, increment=4, samples=24)
    train = TrainSection(steps=10, global_batch=16, rampup=ramp)
    contents(12, samples=44).check_samples(train)
    assert contents(12, samples=44).scalars(LIKE, train).consumed_samples == 44
    with pytest.raises(CheckpointError, match=r"train.rampup to 16 takes 44 samples; .* 48"):
        contents(12, samples=48).check_samples(train)


@pytest.mark.parametrize(
    ("schedule", "behind"), [({}, 0), ({"num_steps": 40}, 0), ({"num_steps": 24}, 16)]
)
def test_a_schedule_that_is_behind_stays_so(schedule: dict[str, int], behind: int) -> None:
    """Of a job that skipped updates: its iterations and consumed samples went on."""
    saved = replace(contents(12), schedule=schedule)
    scalars = saved.scalars(LIKE, TrainSection(steps=10, global_batch=8))
    assert (scalars.consumed_samples, scalars.unscheduled_samples) == (40, behind)
