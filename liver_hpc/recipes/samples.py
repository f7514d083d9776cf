"""The samples of a run: Megatron's GPTDataset over indexed data, the same in every process.

Sample i is a function of (data, sequence length, number of samples, seed) and i alone, so which
samples form the global batch of a step does not depend on the layout, nor on who asks.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from liver_hpc.config.indexed_data import read_indexed_data
from liver_hpc.errors import ConfigError
from liver_hpc.host.files import file_lock, write_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ORDERS = ("document_index", "sample_index", "shuffle_index")


class _Tokenizer:
    """The little that GPTDataset asks of a tokenizer where the tokens exist already.

    It has no pad token, from which GPTDataset concludes that no sample holds padding.
    """

    vocab_size = None
    eod = None
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - Megatron reads it, nobody writes


class _SharedGPTDataset(GPTDataset):  # type: ignore[misc]
    """GPTDataset whose order of samples is made once and then shared through the disk.

    In Megatron rank 0 of the default group builds it, and the other ranks load what they hope is
    there. Here the first process that comes builds it, with or without a default group.
    """

    def __init__(self, *args: Any, order_path: Path) -> None:
        self._order_path = order_path
        super().__init__(*args)

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], ...]:
        paths = [
            self._order_path.with_name(f"{self._order_path.name}-{name}.npy") for name in _ORDERS
        ]
        with file_lock(self._order_path.with_name(f"{self._order_path.name}.lock")):
            if not paths[-1].exists():
                # Without a cache of its own Megatron builds in this process, whatever its rank.
                orders = super()._build_document_sample_shuffle_indices()
                for path, order in zip(paths, orders, strict=True):
                    _save(path, order)
        return tuple(np.load(path, mmap_mode="r") for path in paths)


def _save(path: Path, order: NDArray[Any]) -> None:
    held = io.BytesIO()
    np.save(held, order)
    try:
        write_whole(path, held.getvalue())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


class TokenSamples:
    """Samples 0 .. samples - 1 of seq_length tokens each, from `<prefix>.bin/.idx`.

    The order of samples is kept under `cache`, which all processes of a run share; the first one
    makes it while the others wait. Where the data has too few samples, they come again in a new
    order. Raises ConfigError when the data is not whole or is shorter than one sample.
    """

    def __init__(self, prefix: Path, seq_length: int, samples: int, seed: int, cache: Path) -> None:
        held = read_indexed_data(prefix)
        if held.tokens <= seq_length:
            raise ConfigError(
                f"{prefix} has {held.tokens} tokens; a sample of {seq_length} wants one more than "
                "that many"
            )
        self._samples = samples
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        self._dataset = _SharedGPTDataset(
            GPTDataset.build_low_level_dataset(str(prefix), config),
            str(prefix),
            np.arange(held.sequences, dtype=np.int32),
            samples,
            Split.train,
            config,
            order_path=cache / _order_name(prefix, seq_length, samples, seed),
        )

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens, labels, loss mask), each [seq_length]; int64, int64, float32.

        Raises ConfigError for an index outside 0 .. samples - 1.
        """
        if not 0 <= index < self._samples:
            raise ConfigError(f"sample {index} does not exist: the run has {self._samples}")
        sample = self._dataset[index]
        # GPTDataset hands out one and the same mask.
        return sample["tokens"], sample["labels"], sample["loss_mask"].clone()


def _order_name(prefix: Path, seq_length: int, samples: int, seed: int) -> str:
    """A name made of all that the order depends on, the index file's content included."""
    with prefix.with_name(f"{prefix.name}.idx").open("rb") as stream:
        hashed = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8))
    hashed.update(f"{seq_length}/{samples}/{seed}".encode())
    return f"samples-{hashed.hexdigest()}"
