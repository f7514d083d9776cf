"""The datasets that a script provides, the same on every worker."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import secrets
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import parallel_state

from liver_hpc.errors import ConfigError
from liver_hpc.host.files import LOCK_LIMIT_S, file_lock, first_alone, flush_to_disk
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.recipes.megatron_lm.alone import alone
from liver_hpc.recipes.megatron_lm.capture import Script
from liver_hpc.world import module_globals, thread

_LOCK = "megatron-lm-helpers.lock"
_HELPERS = "megatron.core.datasets.helpers_cpp"
_INDEXED = ("gpt_dataset", "masked_dataset", "blended_dataset")
"""Modules of megatron.core.datasets that keep such a cache."""
_LOADER = "megatron.core.safe_globals"
"""What they read it by, from core 0.19 on."""
_ALONE = ("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "DATA_PARALLEL")
_CACHED = {
    "masks_and_position_ids_are_cached",
    "cached_attention_mask",
    "cached_loss_mask",
    "cached_position_ids",
}
"""What a GPTDataset keeps of its first sample's masks."""


class _OneRank:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class Datasets:
    """By index: what training and validation see; None where the script provides none."""

    train: Any
    validation: Any


def open_datasets(script: Script, layout: Layout, directory: Path, boot_s: float) -> Datasets:
    """Asks the script for its datasets, of as many samples as Megatron would ask for.

    The first process of a run that comes writes the index cache, and compiles Megatron's helpers
    where nobody has, while the others wait, as long as a boot may take; once a file in `directory`
    tells that the cache is complete, all load it side by side. Not collective. Raises ConfigError
    where the helpers cannot be compiled, DeadlineError, and what the script raises.
    """
    world = types.SimpleNamespace()
    captured = script.answer_for(world, layout, Coordinate(0, 0, 0))
    _answer_as_one(world)
    limit_s = max(LOCK_LIMIT_S, boot_s)
    with thread.groups_in_use(world), alone():
        numbers = script.training.get_train_valid_test_num_samples()
        call = hashlib.sha256(repr((script.identity, numbers)).encode()).hexdigest()
        with first_alone(directory / f"script-{call}.complete", limit_s):
            _find_helpers(directory / _LOCK, limit_s)
            _build_as_the_caller()
            _guard_the_cache()
            train, validation, _ = captured.datasets_provider(numbers)
    if train is None:
        raise ConfigError("the script's dataset provider gives no training set")
    _share_masks([*_parts(train), *_parts(validation)])
    return Datasets(train, validation)


def _answer_as_one(world: Any) -> None:
    """parallel_state answers for one worker that does everything."""
    mine = module_globals.namespace_of(world, parallel_state)
    for name in mine:
        if name.startswith("_") and name.endswith(("_GROUP", "_GROUP_WITH_CP")):
            mine[name] = _OneRank()
    for axis in _ALONE:
        mine[f"_MPU_{axis}_RANK"], mine[f"_MPU_{axis}_WORLD_SIZE"] = 0, 1


def _build_as_the_caller() -> None:
    """Has Megatron's builder make the datasets of a blend, which it does on threads of its own, in
    the world of its caller: a script's own may ask for arguments or a tokenizer."""
    builder: Any = importlib.import_module(
        "megatron.core.datasets.blended_megatron_dataset_builder"
    )
    builder.ThreadPoolExecutor = thread.Pool


def _guard_the_cache() -> None:
    """Has Megatron read its index cache, which are arrays of numbers, without unpickling what it
    finds: whoever may write there would be the run's user in effect. And write it so that another
    run, which may begin with the same data at the same time, finds whole files."""
    plain: Any = types.ModuleType(numpy.__name__)
    vars(plain).update(vars(numpy))
    plain.load, plain.save = _load_plainly, _save_whole
    for name in (*(f"megatron.core.datasets.{one}" for one in _INDEXED), _LOADER):
        with suppress(ModuleNotFoundError):
            module: Any = importlib.import_module(name)
            module.numpy = plain


def _load_plainly(file: Any, *args: Any, **options: Any) -> Any:
    """numpy.load; raises ValueError where that would unpickle."""
    return numpy.load(file, *args, **{**options, "allow_pickle": False})


def _save_whole(file: str, array: Any, **options: Any) -> None:
    """numpy.save; a file is whole once it has its name, as Megatron takes it to be. What is there
    already, and may be mapped by another run's workers, stays."""
    path = Path(file)
    with suppress(OSError, ValueError, EOFError):
        if numpy.array_equal(_load_plainly(path, mmap_mode="r"), array):
            return
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with made.open("xb") as stream:
            numpy.save(stream, array, **options)
        flush_to_disk(made)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _find_helpers(lock: Path, limit_s: float) -> None:
    """Imports Megatron's compiled helpers: the checkout's, else those of the wheel, which is of the
    same release; where there are none, one process compiles them, as Megatron-LM does."""
    package: Any = importlib.import_module("megatron.core.datasets")
    with suppress(importlib.metadata.PackageNotFoundError):
        wheel = importlib.metadata.distribution("megatron-core")
        package.__path__.append(str(wheel.locate_file("megatron/core/datasets")))
    if not _has_helpers():
        with file_lock(lock, limit_s):
            if not _has_helpers():  # nor has who had the lock before
                _compile_helpers()


def _has_helpers() -> bool:
    importlib.invalidate_caches()
    with suppress(ImportError):
        importlib.import_module(_HELPERS)
        return True
    return False


def _compile_helpers() -> None:
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    try:
        utils.compile_helpers()
        importlib.import_module(_HELPERS)
    except (SystemExit, ImportError, OSError) as error:  # there may be no `make`
        directory = Path(utils.__file__).parent
        raise ConfigError(
            f"{_HELPERS} cannot be compiled: {error}; `make` in {directory} says why"
        ) from None


def _parts(dataset: Any) -> Iterator[Any]:
    """The datasets that a blend is of, or the one."""
    for part in getattr(dataset, "datasets", None) or [dataset]:
        if part is not None:
            yield part


def _share_masks(datasets: Sequence[Any]) -> None:
    """Megatron's GPTDataset caches the masks of the first sample that it is asked for, and masks
    that sample's padding in its loss mask, too: later samples would depend on which came first.
    Those of a blend cache the same, and an attention mask is large: one makes them for all."""
    makers = dict[Any, Any]()
    for dataset in datasets:
        if not getattr(dataset, "masks_and_position_ids_are_cacheable", False):
            continue
        kind = type(dataset), id(getattr(dataset, "config", None))
        if kind not in makers:
            if not len(dataset):
                continue
            dataset[0]
            mask = getattr(dataset, "cached_loss_mask", None)
            if isinstance(mask, torch.Tensor):
                dataset.cached_loss_mask = torch.ones_like(mask)
            makers[kind] = dataset
        for name in _CACHED & vars(makers[kind]).keys():
            setattr(dataset, name, getattr(makers[kind], name))
