"""The samples of a run: Megatron's GPTDataset over indexed data, the same in every process.

Sample i is a function of (data, sequence length, number of samples, seed) and i alone, so which
samples form the global batch of a step does not depend on the layout, nor on who asks.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, normalize

from liver_hpc.config.indexed_data import checked_share, read_indexed_data
from liver_hpc.errors import ConfigError
from liver_hpc.host.files import LOCK_LIMIT_S, first_alone, write_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Corpus:
    """Indexed data: `<prefix>.bin/.idx`, or several, mixed by weight. split: the shares of
    training, validation and test, as Megatron has them."""

    prefixes: tuple[Path, ...]
    weights: tuple[float, ...] | None = None
    split: str = "1"


class _Tokenizer:
    """The little that GPTDataset asks of a tokenizer where the tokens exist already.

    It has no pad token, from which GPTDataset concludes that no sample holds padding.
    """

    vocab_size = None
    eod = None
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - Megatron reads it, nobody writes


class _Orders:
    """Orders of samples that are made once and then shared through the disk.

    In Megatron rank 0 of the default group builds them, and the other ranks load what they hope is
    there. Here the first process that comes builds them, with or without a default group.
    """

    def __init__(self, cache: Path, limit_s: float, *depends_on: object) -> None:
        self._limit_s = limit_s
        self._path = cache / f"samples-{_digest(depends_on)}"

    def shared(
        self, names: Sequence[str], make: Callable[[], tuple[NDArray[Any], ...]]
    ) -> tuple[NDArray[Any], ...]:
        paths = [self._path.with_name(f"{self._path.name}-{name}.npy") for name in names]
        with first_alone(paths[-1], self._limit_s):
            if not paths[-1].exists():
                for path, order in zip(paths, make(), strict=True):
                    _save(path, order)
        return tuple(np.load(path, mmap_mode="r") for path in paths)


class _SharedGPTDataset(GPTDataset):  # type: ignore[misc]
    def __init__(self, *args: Any, orders: _Orders) -> None:
        self._orders = orders
        super().__init__(*args)
        del self.indices  # a number for each document, which only building wants

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], ...]:
        # Without a cache of its own Megatron builds in this process, whatever its rank.
        return self._orders.shared(
            ("document_index", "sample_index", "shuffle_index"),
            super()._build_document_sample_shuffle_indices,
        )


class _SharedBlendedDataset(BlendedDataset):  # type: ignore[misc]
    def __init__(self, *args: Any, orders: _Orders) -> None:
        self._orders = orders
        super().__init__(*args)

    def _build_indices(self) -> tuple[NDArray[Any], ...]:
        return self._orders.shared(
            ("dataset_index", "dataset_sample_index"), super()._build_indices
        )


def _save(path: Path, order: NDArray[Any]) -> None:
    held = io.BytesIO()
    np.save(held, order)
    _write(path, held.getvalue())


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data, sync=True)  # what is there is not made again
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


class TokenSamples:
    """Samples of seq_length tokens each: first those of training, then those of validation.

    counts: how many of each; those of validation come of that share of the data. Their order is
    kept under `cache`, which all processes of a run share; the first one makes it while the others
    wait, for `limit_s` at most. Where the data has too few samples, they come again in a new order.
    Raises ConfigError when the data is not whole, or not what that one has found, or a share of it
    is shorter than one sample, and DeadlineError.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_length: int,
        counts: Sequence[int],
        seed: int,
        cache: Path,
        limit_s: float = LOCK_LIMIT_S,
    ) -> None:
        self._corpus, self._orders = corpus, partial(_Orders, cache, limit_s)
        self._config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        for prefix in corpus.prefixes:
            read_indexed_data(prefix)
        self._held = [
            GPTDataset.build_low_level_dataset(str(prefix), self._config)
            for prefix in corpus.prefixes
        ]
        self._of_data = [_hash_of_index(prefix, cache, limit_s) for prefix in corpus.prefixes]
        self._check_unchanged(cache, limit_s)
        self._parts = [
            (self._part(split, count), count)
            for split, count in zip(Split, counts, strict=False)
            if count
        ]

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens, labels, loss mask), each [seq_length]; int64, int64, float32.

        Raises ConfigError for an index that is not of a sample.
        """
        within = index
        for dataset, count in self._parts:
            if 0 <= within < count:
                sample = dataset[within]
                # GPTDataset hands out one and the same mask.
                return sample["tokens"], sample["labels"], sample["loss_mask"].clone()
            within -= count
        total = sum(count for _, count in self._parts)
        raise ConfigError(f"sample {index} does not exist: the run has {total}")

    def _check_unchanged(self, cache: Path, limit_s: float) -> None:
        """Data that was replaced under its name has other samples under the same numbers."""
        prefixes = self._corpus.prefixes
        noted = cache / f"data-{_digest([*map(str, prefixes)])}"
        with first_alone(noted, limit_s):
            if not noted.exists():
                _write(noted, "\n".join(self._of_data).encode())
        before = noted.read_text(encoding="utf-8").split()
        for prefix, was, of_index in zip(prefixes, before, self._of_data, strict=True):
            if was != of_index:
                raise ConfigError(
                    f"{prefix}.idx is not what the run began with, whose samples come by it: put "
                    "it back, or go on in a new run by checkpoint.load"
                )

    def _part(self, split: Split, count: int) -> Any:
        """At least `count` samples of a share, in the order of Megatron's builder."""
        if self._corpus.weights is None:
            return self._of_one(0, split, count)
        weights = normalize(list(self._corpus.weights))
        # A blend draws a few more of one than its weight is worth, and as many are made.
        surplus = self._config.mid_level_dataset_surplus
        sizes, made = (
            [size for (size,) in _get_size_per_split_per_dataset(weights, [count], more)]
            for more in (0.0, surplus)
        )
        mixed = [self._of_one(index, split, size) for index, size in enumerate(made)]
        depends_on = (self._of_data, weights, self._corpus.split, split.name, made, sum(sizes))
        orders = self._orders(*depends_on)
        return _SharedBlendedDataset(mixed, weights, sum(sizes), self._config, orders=orders)

    def _of_one(self, index: int, split: Split, count: int) -> _SharedGPTDataset:
        """Samples of a share of one pair of files."""
        held, prefix = self._held[index], self._corpus.prefixes[index]
        seq_length, seed = self._config.sequence_length, self._config.random_seed
        shares = self._corpus.split
        first, end = checked_share(prefix, held.sequence_lengths, shares, split.name, seq_length)
        depends_on = (self._of_data[index], seq_length, first, end, split.name, count, seed)
        return _SharedGPTDataset(
            held,
            str(prefix),
            np.arange(first, end, dtype=np.int32),
            count,
            split,
            self._config,
            orders=self._orders(*depends_on),
        )


def _hash_of_index(prefix: Path, cache: Path, limit_s: float) -> str:
    """The first process takes it of a file, which may have hundreds of gigabytes, and the others
    while that stays as it is."""
    path = prefix.with_name(f"{prefix.name}.idx")
    status = path.stat()
    noted = cache / f"index-{_digest((str(path), status.st_size, status.st_mtime_ns))}"
    with first_alone(noted, limit_s):
        if not noted.exists():
            with path.open("rb") as stream:
                _write(noted, hashlib.file_digest(stream, "sha256").hexdigest().encode())
    return noted.read_text(encoding="utf-8")


def _digest(depends_on: object) -> str:
    return hashlib.sha256(repr(depends_on).encode()).hexdigest()
