"""Known architectures, as values of the GPT recipe's `model` section.

Sizes are those of the published checkpoints' config.json, of the model that each key names.
"""

from __future__ import annotations

from typing import Any

_LLAMA3: dict[str, Any] = {
    "heads": 32,
    "query_groups": 8,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "bias": False,
    "tied_embeddings": False,
    "position": "rope",
    "rotary_base": 500_000,
    "seq_length": 8192,
    "vocab_size": 128_256,
    "dtype": "bf16",
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA3 | {"layers": 32, "hidden": 4096, "ffn_hidden": 14_336},
    "llama3-70b": _LLAMA3 | {"layers": 80, "hidden": 8192, "ffn_hidden": 28_672, "heads": 64},
    "llama3-405b": _LLAMA3 | {"layers": 126, "hidden": 16_384, "ffn_hidden": 53_248, "heads": 128},
}
"""By `model.preset`; what the run file gives itself comes before them."""
