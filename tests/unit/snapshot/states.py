"""States of plain tensors in which every element is another number, and their shares."""

from __future__ import annotations

import torch

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape, optimizer_interval
from liver_hpc.layout.tensors import EXP_AVG, EXP_AVG_SQ, MAIN, PARAMETER, ModelSpec
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.world.state import HeldTensor, WorldState

CPU = torch.device("cpu")
SCALARS = ScalarState(step=7, consumed_samples=56, optimizer_step=7, loss_scale=1.0, seed=1)


def filled(model: ModelSpec, layout: Layout, at: Coordinate, dtype: torch.dtype) -> WorldState:
    """The same state in whatever layout: each element's value says where it is. dtype: of what has
    the model's precision; the rest is fp32."""
    held = {}
    for index in model.held_tensors(layout, at):
        tensor = model.tensors[index]
        rows, cols = local_shape(tensor, layout.tp)
        start, end = optimizer_interval(model, layout, at, index)
        own = {MAIN: torch.zeros(0)} if model.main_is_parameter else {}
        kinds = {kind: torch.zeros(end - start) for kind in model.optimizer_kinds}
        shape = (rows, cols) if len(tensor.shape) == 2 else (rows,)
        low = model.element_bytes(PARAMETER, index) == dtype.itemsize
        value = torch.zeros(shape, dtype=dtype if low else torch.float32)
        held[index] = HeldTensor(value, (start, end), own | kinds)
    state = WorldState(model, layout, at, held)
    for number, kind in enumerate((PARAMETER, MAIN, EXP_AVG, EXP_AVG_SQ)):
        if kind not in model.kinds:
            continue
        for index, box in state.boxes(kind):
            cols = model.tensors[index].cols
            places = torch.arange(box.row0, box.row1)[:, None] * cols
            values = (places + torch.arange(box.col0, box.col1)) * 0.37 + index
            moment = 100 * number if kind in (EXP_AVG, EXP_AVG_SQ) else 0
            state.view(kind, index, box).copy_(values + moment)
    return state


def share_of(state: WorldState, generation: int = 0) -> Snapshot:
    """A snapshot that was taken of it."""
    snapshot = Snapshot(state.model, state.layout, state.layout.rank(state.at), generation)
    snapshot.take(state, SCALARS)
    snapshot.digests = snapshot.digest()
    return snapshot
