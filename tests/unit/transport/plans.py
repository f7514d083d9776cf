"""Random transfer plans over small tensors, of no layout in particular."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from liver_hpc.layout.tensors import (
    EXP_AVG,
    PARAMETER,
    Box,
    ModelSpec,
    Move,
    TensorSpec,
    TransferPlan,
)

KINDS = (PARAMETER, EXP_AVG)


@dataclass(frozen=True)
class RandomPlans:
    """A model of a few matrices, and the plan of every worker: `plans[worker]`."""

    model: ModelSpec
    moves: tuple[Move, ...]
    plans: tuple[TransferPlan, ...]


@st.composite
def _cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """[0, length) as up to three ranges."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
    return list(pairwise([0, *sorted(inner), length]))


@st.composite
def random_plans(draw: st.DrawFn) -> RandomPlans:
    workers = draw(st.integers(2, 5))
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4)
    )
    tensors = tuple(TensorSpec(f"t{index}", shape) for index, shape in enumerate(shapes))
    model = ModelSpec(tensors, {"pp1": ((tuple(range(len(tensors))),),)}, parameter_bytes=2)
    ids = st.integers(0, workers - 1)
    moves = []
    for index, (rows, cols) in enumerate(shapes):
        for kind in KINDS:
            for row0, row1 in draw(_cuts(rows)):
                for col0, col1 in draw(_cuts(cols)):
                    box = Box(row0, row1, col0, col1)
                    for receiver in draw(st.sets(ids, max_size=workers)):
                        moves.append(Move(index, kind, box, draw(ids), receiver))
    return RandomPlans(model, tuple(moves), tuple(plan_of(moves, who) for who in range(workers)))


def plan_of(moves: list[Move], worker: int) -> TransferPlan:
    """What one worker has to do of all moves."""
    return TransferPlan(
        worker,
        tuple(sorted(m for m in moves if m.sender == worker != m.receiver)),
        tuple(sorted(m for m in moves if m.receiver == worker != m.sender)),
        tuple(sorted(m for m in moves if m.sender == m.receiver == worker)),
    )
