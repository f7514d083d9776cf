"""The models that are moved, and between which layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import SEQUENCE_PARALLEL, Layout

WORKERS = 8
TRAINED = 3
"""Steps before the first transition, so that the optimizer's state says something."""
COMPARED = 10
"""Steps after a transition, and of the run that stayed."""

AXES = tuple(axis.name for axis in fields(Layout) if axis.name != "sequence_parallel")

_SIZES = {
    "layers": 4,
    "hidden": 32,
    "ffn_hidden": 48,
    "heads": 4,
    "query_groups": 2,
    "seq_length": 32,
    "vocab_size": 320,
    "init_std": 0.1,
}
"""With weights so large at first, all layers have their part in the loss."""


@dataclass(frozen=True)
class Family:
    """One model and batch, and its moves: "tp2 > dp2, pp2" is from the first layout to each of the
    others. model, train: sections of the run file. The name says "bf16" where the model is it."""

    name: str
    model: Mapping[str, Any]
    moves: Sequence[str]
    train: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = "liver_hpc.recipes.gpt:GPT"

    def config(self, data: Mapping[str, Any]) -> RunConfig:
        """The run that trains it, on the given `data` section."""
        return RunConfig.model_validate(
            {
                "recipe": self.recipe,
                "data": data,
                "model": _SIZES | dict(self.model),
                "optimizer": {"lr": 3e-3},
                "train": {"steps": TRAINED + COMPARED, "global_batch": 4} | dict(self.train),
                "workers": {"initial": 1, "max": WORKERS},
                "layouts": {1: {"dp": 1}},
                "handoff": {"staging_bytes": 1 << 18, "bucket_bytes": 1 << 16},
            }
        )

    @property
    def transitions(self) -> list[tuple[Layout, list[Layout]]]:
        """Each source, and its targets."""
        pairs = [move.split(" > ") for move in self.moves]
        return [(Layout.parse(a), [*map(Layout.parse, b.split(", "))]) for a, b in pairs]

    @property
    def layouts(self) -> list[Layout]:
        return sorted({one for source, targets in self.transitions for one in (source, *targets)})


def changed_axes(source: Layout, target: Layout) -> list[str]:
    """The axes along which two layouts differ; sequence parallelism counts as one."""
    changed = [axis for axis in AXES if getattr(source, axis) != getattr(target, axis)]
    shared = source.sequence_parallel != target.sequence_parallel
    return [*changed, *([SEQUENCE_PARALLEL] if shared else [])]


def is_uneven(config: RunConfig, layout: Layout) -> bool:
    """Whether some data-parallel ranks compute a micro-batch more than others."""
    return config.train.global_batch // config.train.micro_batch % layout.dp != 0


def quick(families: Sequence[Family]) -> list[Family]:
    """The first two transitions of each family."""
    firsts = (family.moves[0].split(", ")[:2] for family in families)
    return [
        replace(family, moves=[", ".join(first)])
        for family, first in zip(families, firsts, strict=True)
    ]


_LEARNED = {"position": "learned", "normalization": "layernorm", "activation": "gelu", "bias": True}
_EXPERTS = {
    "ffn_hidden": 40,
    "score_function": "sigmoid",
    "bias_update_rate": 0.05,
    "aux_loss_coeff": 0.02,
    "z_loss_coeff": 0.001,
}

FAMILIES = (
    Family(
        "dense, tied",
        {},
        [
            "tp2 dp2 > pp2 vpp2 dp2, dp3, pp3 dp2, cp2 dp2, pp2 dp2, pp4, tp2 pp2, dp4, tp1",
            "pp2 dp3 > tp2 dp2, dp4, pp4, tp2 dp3",
            "tp2 cp2 dp2 > dp3, cp4, tp2 pp2 cp2, tp2 dp2",
            "pp2 vpp2 dp2 > dp3, tp2 dp2, pp2 dp2, pp2 cp2, tp2 pp2 vpp2",
            "tp2 pp2 sp > tp2 dp2, tp2 cp2 sp, dp4",
        ],
    ),
    Family(
        "dense, untied",
        {"tied_embeddings": False, "query_groups": 4, **_LEARNED},
        [
            "dp4 > pp2 vpp2 cp2, tp4, tp2 pp2, pp4, dp3",
            "tp2 pp2 dp2 > tp4 sp, tp4 dp2, pp2 cp2 dp2",
        ],
    ),
    Family(
        "dense, tied, bf16",
        {"dtype": "bf16"},
        ["tp2 pp2 > cp2 dp2, dp3, dp4, pp4, tp2 dp2, pp2 vpp2 dp2"],
    ),
    Family(
        "dense, 8 micro-batches",
        {},
        ["dp8 > dp7, tp2 pp2 dp2", "dp7 > dp8, tp2 dp3"],
        train={"global_batch": 8},
    ),
    Family(
        "frozen parameters, buffers",
        {"tied_embeddings": False},
        ["tp2 dp2 > pp2 vpp2 dp2, cp2 dp3, pp4, dp4"],
        recipe="benchmarks.transitions.models:Adapted",
    ),
    Family(
        "experts, untied",
        {
            "tied_embeddings": False,
            "experts": {"number": 6, "shared_ffn_hidden": 24, "load_balancing": "seq_aux_loss"}
            | _EXPERTS,
        },
        [
            "dp3 ep3 > tp2 dp2 ep2 sp, pp2 vpp2 dp2 ep2, pp2 cp2 ep2, dp4 ep2, dp4, pp4",
            "tp2 dp2 ep2 sp > dp3 ep3, dp2 cp2 ep2, pp2 dp2 ep2, tp2 pp2 dp2 ep2 sp",
            "pp2 dp3 ep3 > tp2 cp2 ep2 sp, tp2 pp2 sp, dp4 ep2",
        ],
    ),
    Family(
        "experts, tied, allgather",
        {
            "experts": {"number": 4, "load_balancing": "aux_loss", "layer_freq": 2}
            | _EXPERTS
            | {"dispatcher": "allgather"},
        },
        ["dp4 ep4 > tp2 dp2 ep2 sp, dp3, dp2 ep2, dp2 cp2 ep4, pp2 dp2 ep2"],
    ),
    Family(
        "experts, untied, bf16",
        {
            "dtype": "bf16",
            "tied_embeddings": False,
            "experts": {"number": 4, "load_balancing": "seq_aux_loss"} | _EXPERTS,
        },
        ["dp2 ep2 > pp2 cp2 ep2, dp4 ep4, tp2 dp2 ep2 sp, dp3, pp2 vpp2 dp2"],
    ),
    Family(
        "overlap",
        {},
        ["tp2 dp2 > pp2 vpp2 dp2, dp3, cp2, pp4", "pp2 vpp2 dp2 > dp4, tp2 dp2"],
        train={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_elements": 3000},
    ),
    Family(
        "recompute all",
        {"recompute": "full"},
        ["tp2 dp2 > pp2 vpp2 dp2, cp2 dp3, tp2 pp2 sp"],
    ),
    Family(
        "recompute some",
        {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
        ["pp2 dp2 > tp2 cp2 sp, dp3, pp4"],
    ),
    Family(
        "dropout",
        {"dropout": 0.1},
        ["pp2 dp2 > pp2 vpp2, dp3, cp2 dp2, pp4, dp4"],
    ),
)
