"""Known architectures, as values of the GPT recipe's `model` section.

Sizes are those of the published checkpoints' config.json, of the model that each key names.
"""

from __future__ import annotations

from typing import Any

_DECODER: dict[str, Any] = {
    "heads": 32,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "bias": False,
    "tied_embeddings": False,
    "position": "rope",
    "dtype": "bf16",
}
_LLAMA3 = _DECODER | {
    "query_groups": 8,
    "rotary_base": 500_000,
    "seq_length": 8192,
    "vocab_size": 128_256,
}
_BALANCED = {"load_balancing": "aux_loss"}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA3 | {"layers": 32, "hidden": 4096, "ffn_hidden": 14_336},
    "llama3-70b": _LLAMA3 | {"layers": 80, "hidden": 8192, "ffn_hidden": 28_672, "heads": 64},
    "llama3-405b": _LLAMA3 | {"layers": 126, "hidden": 16_384, "ffn_hidden": 53_248, "heads": 128},
    "mixtral-8x7b": _DECODER
    | {
        "layers": 32,
        "hidden": 4096,
        "ffn_hidden": 14_336,
        "query_groups": 8,
        "rotary_base": 1_000_000,
        "seq_length": 4096,
        "vocab_size": 32_000,
        "experts": _BALANCED | {"number": 8, "topk": 2, "aux_loss_coeff": 0.02},
    },
    "qwen3-30b-a3b": _DECODER
    | {
        "layers": 48,
        "hidden": 2048,
        "ffn_hidden": 6144,
        "query_groups": 4,
        "head_dim": 128,
        "qk_norm": True,
        "rotary_base": 1_000_000,
        "seq_length": 4096,
        "vocab_size": 151_936,
        "experts": _BALANCED
        | {"number": 128, "topk": 8, "ffn_hidden": 768, "aux_loss_coeff": 0.001},
    },
}
"""By `model.preset`; what the run file gives itself comes before them."""
