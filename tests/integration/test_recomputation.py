"""What the backward computes again is what the forward computed, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.worlds import Case, apart, train_cases

DROPPING = {"dropout": 0.1}
FULL = {"recompute": "full"}
MODES = [
    {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    FULL,
    {"recompute": "full", "recompute_method": "block"},
]


class TorchCheckpoints(RandomTokenGPT):
    """Its layers are checkpointed as torch does it, which knows nothing of Megatron."""

    def _block(self, config: Any, context: Any) -> Any:
        from megatron.core.transformer.transformer_layer import TransformerLayer
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(TransformerLayer):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

        block = super()._block(config, context)
        for layer in block.layer_specs:
            layer.module = Checkpointed
        return block


class AttentionAgain(RandomTokenGPT):
    """Computes attention alone again, by Megatron's checkpoint."""

    def _block(self, config: Any, context: Any) -> Any:
        from megatron.core.tensor_parallel import checkpoint

        block = super()._block(config, context)
        for layer in block.layer_specs:
            base = layer.submodules.self_attention.module

            class Checkpointed(base):  # type: ignore[misc]
                def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
                    attend = super().__call__
                    return checkpoint(lambda given: attend(given, *args, **kwargs), False, states)

            layer.submodules.self_attention.module = Checkpointed
        return block


def test_megatrons_checkpoint_within_a_layer_sets_attentions_dropout_back(tmp_path: Path) -> None:
    """Its stream is the tracker's, which torch's checkpoint does not know of."""
    recipes = (RandomTokenGPT, AttentionAgain)
    cases = [Case("dp1", DROPPING, recipe=recipe, steps=2) for recipe in recipes]
    plain, again = run_workers(train_cases, 1, tmp_path, cases)[0]
    assert again == plain


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_loss_is_the_same_with_and_without_recomputation(tmp_path: Path) -> None:
    layouts = ["pp2", "cp2", "pp2 vpp2"]
    cases = [Case(one, {**DROPPING, **mode}, steps=2) for one in layouts for mode in ({}, *MODES)]
    cases += [Case(one, DROPPING, recipe=TorchCheckpoints, steps=2) for one in layouts]
    found = run_workers(train_cases, 2, tmp_path, cases)[0]
    plain = dict(zip(layouts, found[:: 1 + len(MODES)], strict=False))
    for case, one in zip(cases, found, strict=True):
        assert one == plain[case.layout], case


def forgetful(process: WorkerProcess) -> list[Any]:
    """Trains a pipeline whose backward does not recall what the forward was of."""
    from liver_hpc.world import thread

    thread.recall_in_backward = lambda _output: None  # type: ignore[assignment]
    return train_cases(process, [Case("pp2", DROPPING), Case("pp2", {**DROPPING, **FULL})])


def test_without_recalling_the_micro_batch_masks_are_of_another(tmp_path: Path) -> None:
    """The loss of the first step is right all the same: only its gradients are not."""
    plain, recomputed = run_workers(forgetful, 2, tmp_path)[0]
    assert apart(recomputed[:1], plain[:1]) > 1e-4
    assert recomputed[0][0] == plain[0][0]
