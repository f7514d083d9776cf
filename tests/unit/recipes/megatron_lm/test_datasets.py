"""Who asks a script for its datasets, and when."""

from __future__ import annotations

import pickle
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import blended_dataset, gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.megatron_lm import datasets
from liver_hpc.world import module_globals, thread

ASKED = (8, 0, 0)


@pytest.fixture(autouse=True)
def no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_find_helpers", lambda *_args: None)
    monkeypatch.setattr(datasets, "_answer_as_one", lambda _world: None)


def opened(directory: Path, provider: Any, identity: str = "a script", numbers: Any = ASKED) -> Any:
    training = types.SimpleNamespace(get_train_valid_test_num_samples=lambda: numbers)
    captured = types.SimpleNamespace(datasets_provider=provider)
    script: Any = types.SimpleNamespace(
        identity=identity, training=training, answer_for=lambda *_args: captured
    )
    return datasets.open_datasets(script, Layout(1, 1, 1), directory, boot_s=60)


def test_helpers_where_there_is_no_compiler_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"helpers_cpp cannot be compiled: .*'make'; `make` in"):
        datasets._compile_helpers()


class _Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("module", [gpt_dataset, blended_dataset])
def test_megatrons_index_cache_is_not_unpickled(module: Any, tmp_path: Path) -> None:
    """Whoever may write there would run code in every worker."""
    index, planted, executed = (tmp_path / name for name in ("a.npy", "b.npy", "executed"))
    np.save(index, np.arange(6, dtype=np.int32))
    planted.write_bytes(pickle.dumps(_Planted(executed)))

    def provider(_numbers: Any) -> Any:
        load = getattr(module, "safe_numpy_load", module.numpy.load)  # from core 0.19 on
        assert [*load(index, allow_pickle=True, mmap_mode="r")] == [*range(6)]
        load(planted, allow_pickle=True, mmap_mode="r")

    with pytest.raises(ValueError, match="ickle"):
        opened(tmp_path, provider)
    assert not executed.exists()


@pytest.mark.parametrize("module", [gpt_dataset, blended_dataset])
def test_the_cache_that_another_run_has_mapped_is_not_written_over(
    module: Any, tmp_path: Path
) -> None:
    """As runs begin side by side: pages that a file has no longer end a process by SIGBUS."""
    same, torn = (str(tmp_path / name) for name in ("same.npy", "torn.npy"))
    np.save(same, np.arange(6, dtype=np.int32))
    np.save(torn, np.arange(10, 14, dtype=np.int32))
    others, inode = np.load(torn, mmap_mode="r"), Path(same).stat().st_ino

    def provider(_numbers: Any) -> Any:
        for path in (same, torn):
            module.numpy.save(path, np.arange(6, dtype=np.int32), allow_pickle=True)
        return ["a sample"], None, None

    opened(tmp_path / "data-cache", provider)
    assert [*others] == [*range(10, 14)]
    assert [*np.load(torn)] == [*range(6)]
    assert Path(same).stat().st_ino == inode, "which NFS would take away from who has it mapped"
    assert sorted(path.name for path in tmp_path.glob("*.npy")) == ["same.npy", "torn.npy"]


def test_one_writes_the_cache_then_all_load_it_side_by_side(tmp_path: Path) -> None:
    written, loading, together = threading.Event(), [0], threading.Barrier(4)

    def provider(_numbers: Any) -> Any:
        if not written.is_set():
            loading[0] += 1
            assert loading[0] == 1, "another one is in the provider before there is a cache"
            threading.Event().wait(0.3)
            written.set()
        else:
            together.wait(timeout=5)  # breaks where they come one after the other
        return ["a sample"], None, None

    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(opened, tmp_path / "data-cache", provider) for _ in range(5)]
        assert [each.result(timeout=30).train for each in asked] == [["a sample"]] * 5


def test_the_cache_of_another_call_is_not_taken_for_its_own(tmp_path: Path) -> None:
    def provider(_numbers: Any) -> Any:
        return ["a sample"], None, None

    for identity, numbers in (("a script", ASKED), ("a script", (9, 0, 0)), ("another", ASKED)):
        before = len([*tmp_path.glob("*.complete")])
        opened(tmp_path, provider, identity, numbers)
        opened(tmp_path, provider, identity, numbers)
        assert len([*tmp_path.glob("*.complete")]) == before + 1


def test_a_provider_that_failed_has_left_no_cache(tmp_path: Path) -> None:
    def provider(_numbers: Any) -> Any:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        opened(tmp_path, provider)
    assert not [*tmp_path.glob("*.complete")]


# ---- blends


TOKENIZER = types.SimpleNamespace(vocab_size=64, eod=0, pad=-1, unique_identifiers={})


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Of two pairs of files, each with 160 tokens."""
    made = [str(tmp_path / name) for name in ("a", "b")]
    for prefix in made:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for _ in range(4):
            builder.add_document(torch.arange(40), [40])
        builder.finalize(f"{prefix}.idx")
    return made


def blend(prefixes: list[str], cache: Path, kind: type[GPTDataset] = GPTDataset) -> Any:
    """What Megatron builds of both, for training alone."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=(prefixes, [0.3, 0.7]),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(kind, ASKED, lambda: True, config).build()


@pytest.fixture
def no_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a worker boots."""
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", None)


@pytest.mark.usefixtures("no_default_group")
def test_a_blend_has_a_cache_which_the_next_one_loads(tmp_path: Path, prefixes: list[str]) -> None:
    """BlendedDataset of megatron-core 0.16 asks for its rank, initialized or not."""
    cache = tmp_path / "cache"
    first = opened(tmp_path, lambda _numbers: blend(prefixes, cache)).train
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert any("BlendedDataset" in path.name for path in written)
    second = opened(tmp_path, lambda _numbers: blend(prefixes, cache)).train
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written
    assert second.dataset_index.tolist() == first.dataset_index.tolist()


SCRIPTS: Any = types.ModuleType("globals_of_the_script")
exec("ARGS = None\n\ndef get_args():\n    return ARGS\n", vars(SCRIPTS))


class AskingDataset(GPTDataset):  # type: ignore[misc]
    """A script's own, that asks for what Megatron keeps in globals."""

    def __init__(self, *args: Any) -> None:
        assert SCRIPTS.get_args() == "of this world"
        assert torch.distributed.get_rank() == 0
        super().__init__(*args)


@pytest.mark.usefixtures("no_default_group")
def test_a_blends_datasets_are_made_in_the_world_of_the_script(
    tmp_path: Path, prefixes: list[str]
) -> None:
    """Megatron's builder makes them on threads of its own."""

    def provider(_numbers: Any) -> Any:
        module_globals.namespace_of(thread.here.groups, SCRIPTS)["ARGS"] = "of this world"
        return blend(prefixes, tmp_path / "cache", AskingDataset)

    assert len(opened(tmp_path, provider).train.datasets) == 2
    assert SCRIPTS.get_args() is None


@pytest.mark.usefixtures("no_default_group")
def test_datasets_of_a_blend_have_one_mask_which_one_sample_makes(
    tmp_path: Path, prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the square of a sample's length, and a blend is of hundreds."""
    plain, read = GPTDataset._query_document_sample_shuffle_indices, []

    def query(self: GPTDataset, index: int) -> Any:
        read.append(index)
        return plain(self, index)

    monkeypatch.setattr(GPTDataset, "_query_document_sample_shuffle_indices", query)
    found = opened(tmp_path, lambda _numbers: blend(prefixes, tmp_path / "cache")).train
    assert read == [0]
    one, other = (dataset[1] for dataset in found.datasets)
    assert one["attention_mask"] is other["attention_mask"]
    assert torch.equal(one["loss_mask"], other["loss_mask"])


@pytest.mark.usefixtures("no_default_group")
def test_an_index_that_was_not_written_whole_is_built_again(
    tmp_path: Path, prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron takes what has its name for whole, and loads it in each later start."""
    plain = np.save

    def save(file: Any, array: Any, **options: Any) -> None:
        if "shuffle_index" not in str(getattr(file, "name", file)):
            return plain(file, array, **options)
        with open(file, "wb") if isinstance(file, str) else file as stream:
            stream.write(b"\x93NUMPY")
        raise OSError("no space left")

    def made() -> Any:
        return opened(tmp_path, lambda _numbers: blend(prefixes, tmp_path / "cache")).train

    with monkeypatch.context() as full:
        full.setattr(np, "save", save)
        with pytest.raises(OSError, match="no space left"):
            made()
    assert len(made()) >= 8
