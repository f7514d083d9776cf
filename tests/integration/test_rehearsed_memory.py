"""What a real rehearsal keeps for its backward, beside what the recipe says by rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from liver_hpc.layout.coordinates import Layout, RankMap
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import Case, recipe_of

SIZES = {"hidden": 128, "ffn_hidden": 256, "seq_length": 64, "vocab_size": 512}
RECOMPUTED = {"experts": {"number": 4}, "recompute": "selective"}
CASES = [
    Case("dp1", SIZES),
    Case("dp1", SIZES | {"activation": "gelu", "dtype": "bf16"}),
    Case("dp1", SIZES | {"recompute": "full"}),
    Case("dp1", SIZES | {"recompute": "full", "recompute_num_layers": 2}),
    Case("dp1", SIZES | {"recompute": "full", "recompute_method": "block"}),
    Case("dp1", SIZES | {"qk_norm": True}),
    Case("dp1", SIZES | {"seq_length": 256, "recompute": "selective"}),
    Case("dp1", SIZES | {"query_groups": 4, "normalization": "layernorm"}),
    Case("dp1", SIZES | {"experts": {"number": 4}}),
    Case("dp1", SIZES | RECOMPUTED | {"recompute_modules": ["moe"]}),
    Case("dp1", SIZES | RECOMPUTED | {"recompute_modules": ["mlp"]}),
    Case("tp2", SIZES),
    Case("pp2", SIZES),
    Case("pp2 vpp2", SIZES),
]


class _Kept:
    """Bytes of the storages that are saved for a backward, each once, but for parameters."""

    def __init__(self, world: Any) -> None:
        own = [p for chunk in world.chunks for p in chunk.parameters()]
        self._parameters = {p.untyped_storage().data_ptr() for p in own}
        self._times = Counter[int]()
        self._live = 0
        self.most = 0

    def save(self, tensor: Any) -> Any:
        return _Saved(self, tensor)

    def count(self, storage: Any, times: int) -> None:
        place = storage.data_ptr()
        if place in self._parameters:
            return
        was = self._times[place]
        self._times[place] += times
        self._live += storage.nbytes() * ((self._times[place] > 0) - (was > 0))
        self.most = max(self.most, self._live)


class _Saved:
    def __init__(self, kept: _Kept, tensor: Any) -> None:
        self._kept, self.tensor = kept, tensor
        kept.count(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._kept.count(self.tensor.untyped_storage(), -1)


def compare(process: WorkerProcess, cases: list[Case]) -> list[tuple[int, int]]:
    """Of each case, bytes kept on the first worker, and those by rule."""
    import torch

    from liver_hpc.world.world import World

    found = []
    for generation, case in enumerate(cases):
        recipe = recipe_of(case, process.worker)
        layout = Layout.parse(case.layout)
        rank_map = RankMap(layout, tuple(range(layout.workers)))
        world = World(recipe, rank_map, process.worker, generation, process.device)
        kept = _Kept(world)
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda saved: saved.tensor):
            world.warm_up()
        world.close()
        found.append((kept.most, recipe.rehearsal_bytes(layout)))
    return found


def test_a_rehearsal_keeps_what_the_rule_says(tmp_path: Path) -> None:
    (found,) = run_workers(compare, 1, tmp_path, CASES)
    shares = {f"{case.layout} {case.model}": said / kept
              for case, (kept, said) in zip(CASES, found, strict=True)}  # fmt: skip
    assert all(0.85 < share < 1.4 for share in shares.values()), shares
