"""A rehearsal drops nothing, whoever would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from liver_hpc.errors import PlanError
from liver_hpc.world import dropout, thread
from liver_hpc.world.dropout import no_dropout

STATES = torch.ones(2, 4, 8)


class Fused(torch.nn.Module):
    """Draws in its kernel, as attention of Transformer Engine's does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.3

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(states) if self.attention_dropout else states


def dropping(part: torch.nn.Module, hidden_dropout: float = 0.0) -> Any:
    chunk: Any = torch.nn.Sequential(part)
    chunk.config = SimpleNamespace(hidden_dropout=hidden_dropout, attention_dropout=0.0)
    return chunk


@pytest.mark.parametrize(
    "attend",
    [
        lambda s: functional.dropout(s, 0.5),
        lambda s: functional.dropout1d(s, 0.5),
        lambda s: functional.dropout2d(s[None], 0.5),
        lambda s: functional.scaled_dot_product_attention(s, s, s, dropout_p=0.5),
        lambda s: functional.scaled_dot_product_attention(s, s, s, None, 0.5),
        lambda s: functional.scaled_dot_product_attention(s, s, s, None, 0.5, True),
    ],
)
def test_nothing_is_drawn(attend: Any) -> None:
    chunk = dropping(Fused())
    before = torch.get_rng_state()
    with no_dropout([chunk]):
        chunk(attend(STATES))
    assert torch.equal(torch.get_rng_state(), before)
    attend(STATES)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "part",
    [
        torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5),
        torch.nn.MultiheadAttention(8, 2, dropout=0.5),
        torch.nn.GRU(8, 8, 2, dropout=0.5),
    ],
)
def test_layers_of_torch_draw_nothing(part: Any) -> None:
    states = (STATES,) * (3 if isinstance(part, torch.nn.MultiheadAttention) else 1)
    before = torch.get_rng_state()
    with no_dropout([dropping(part)]):
        part(*states)
    assert torch.equal(torch.get_rng_state(), before)
    part(*states)
    assert not torch.equal(torch.get_rng_state(), before)


def test_what_attends_in_a_kernel_drops_again_afterwards() -> None:
    chunk = dropping(Fused())

    def fail() -> None:
        with no_dropout([chunk]):
            assert chunk[0].attention_dropout == 0.0
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert chunk[0].attention_dropout == 0.3


@pytest.mark.parametrize(
    ("drop", "drops"),
    [
        (lambda s: functional.dropout(s), True),
        (lambda s: functional.dropout(s, 0.1, True), True),
        (lambda s: functional.dropout(s, p=0.1, training=True), True),
        (lambda s: functional.alpha_dropout(s, 0.1, True), True),
        (lambda s: functional.dropout1d(s, 0.1), True),
        (lambda s: torch.dropout(s, 0.1, train=True), True),
        (lambda s: functional.scaled_dot_product_attention(s, s, s, dropout_p=0.1), True),
        (lambda s: functional.scaled_dot_product_attention(s, s, s, None, 0.1), True),
        (lambda s: functional.dropout(s, 0.0, True), False),
        (lambda s: functional.dropout(s, 0.1, False), False),
        (lambda s: functional.alpha_dropout(s, 0.1), False),
        (lambda s: torch.dropout(s, 0.1, train=False), False),
        (lambda s: functional.scaled_dot_product_attention(s, s, s), False),
        (lambda s: functional.scaled_dot_product_attention(s, s, s, None, 0.0), False),
    ],
)
def test_dropout_of_which_no_module_tells_is_refused(drop: Any, drops: bool) -> None:
    refused = pytest.raises(PlanError, match=r"with a rate of .* which no module of it has")
    with (
        refused if drops else contextlib.nullcontext(),
        no_dropout([dropping(torch.nn.Linear(8, 8))]),
    ):
        drop(STATES)
    with no_dropout(
        [dropping(torch.nn.Linear(8, 8), hidden_dropout=0.1)]
    ):  # is seeded at its layers
        drop(STATES)


class OnGpu(torch.nn.Module):
    def __init__(self, hidden_dropout: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=hidden_dropout)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(is_cuda=True)


@pytest.mark.parametrize(("rate", "modes"), [(0.0, 0), (0.1, 1)])
def test_what_has_no_dropout_is_compiled_as_a_step_calls_it(rate: float, modes: int) -> None:
    before = torch._C._len_torch_function_stack()
    with no_dropout([OnGpu(rate)]):
        assert torch._C._len_torch_function_stack() - before == modes


def test_no_layer_has_the_masks_of_another_one_on_another_tensor_parallel_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron seeds a rank's own stream by a layer's seed and its rank."""
    seeds: list[int] = []
    monkeypatch.setattr(
        dropout.megatron, "seed_dropout", lambda seed, tp_rank, _: seeds.append(seed + tp_rank)
    )
    for sample in range(3):
        micro_batch = SimpleNamespace(first_sample=sample)
        monkeypatch.setattr(thread.here, "micro_batch", micro_batch)
        for layer in range(33):
            for tp_rank in range(8):
                dropout._seed(1234, layer, tp_rank, False, SimpleNamespace(training=True), ())
    assert len({*seeds}) == len(seeds) == 3 * 33 * 8


@pytest.mark.parametrize(
    ("part", "drops"),
    [
        (torch.nn.MultiheadAttention(8, 2, dropout=0.1), True),
        (torch.nn.MultiheadAttention(8, 2), False),
        (torch.nn.Dropout(0.5), True),
        (torch.nn.LayerNorm(8), False),
        (torch.nn.TripletMarginLoss(p=2.0), False),
    ],
)
def test_what_drops_is_known_by_its_rate(part: torch.nn.Module, drops: bool) -> None:
    chunk: Any = torch.nn.Sequential(part)
    chunk.config = SimpleNamespace(hidden_dropout=0.0, attention_dropout=0.0)
    assert dropout._drops(chunk) is drops


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_what_torch_would_compile_dropout_of_does_without(rate: float) -> None:
    """Compiled, it draws by another numbering; under a mode it may not be compiled."""
    chunk: Any = torch.nn.Sequential(torch.nn.Sequential())
    chunk.config = SimpleNamespace(hidden_dropout=rate, bias_dropout_fusion=True)
    chunk[0].config = SimpleNamespace(bias_dropout_fusion=True)
    dropout.seed_at_layers(chunk, seed=1, tp_rank=0, sequence_parallel=False)
    assert chunk.config.bias_dropout_fusion is (rate == 0)
    assert chunk[0].config.bias_dropout_fusion is (rate == 0)
