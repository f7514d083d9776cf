"""From text files to samples, and every way in which data can be wrong."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from liver_hpc.config.schema import DataSection
from liver_hpc.errors import ConfigError, DeadlineError
from liver_hpc.host.files import file_lock
from liver_hpc.recipes import text_data
from liver_hpc.recipes.samples import Corpus, TokenSamples, _Tokenizer
from liver_hpc.recipes.text_data import END_OF_DOCUMENT, prepare, text_files

TEXTS = {"b.txt": b"second", "a.txt": "fürst\x00\xff".encode("latin-1"), "sub/c.txt": b"third"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path / "texts"


def section(texts: Path, pattern: str = "**/*.txt", limit: int = 1 << 20) -> DataSection:
    return DataSection(
        text=[str(texts / pattern)], directory=texts.parent / "data", max_text_bytes=limit
    )


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert dataset.index.dtype is np.uint16
    return [dataset[index].tolist() for index in range(len(dataset))]


# ---- text to tokens


def test_a_file_is_a_document_of_its_bytes(texts: Path) -> None:
    assert documents(prepare(section(texts)).prefix) == [
        [*TEXTS[name], END_OF_DOCUMENT] for name in ("a.txt", "b.txt", "sub/c.txt")
    ]


def test_the_limit_cuts_the_text(texts: Path) -> None:
    found = documents(prepare(section(texts, limit=len(TEXTS["a.txt"]) + 3)).prefix)
    assert found == [[*TEXTS["a.txt"], END_OF_DOCUMENT], [*b"sec", END_OF_DOCUMENT]]


def test_the_pair_is_as_megatron_writes_it(texts: Path, tmp_path: Path) -> None:
    written = prepare(section(texts)).prefix
    builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.uint16)
    for document in documents(written):
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "megatron.idx"))
    for suffix in ("bin", "idx"):
        expected = (tmp_path / f"megatron.{suffix}").read_bytes()
        assert written.with_name(f"{written.name}.{suffix}").read_bytes() == expected


def test_what_has_its_name_is_on_the_disk(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost takes with it what it has only in memory, and leaves the names: what is
    there is not made again."""
    synced, sync, replace = dict[int, int](), os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size
        sync(descriptor)

    def named(path: Path, target: Path) -> Path:
        assert synced.get(path.stat().st_ino) == path.stat().st_size > 0, target
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", named)
    prefix = prepare(section(texts)).prefix
    TokenSamples(Corpus((prefix,)), 4, (2,), 1, tmp_path / "cache")
    assert {prefix.parent.stat().st_ino, (tmp_path / "cache").stat().st_ino} <= synced.keys()


def test_what_is_done_is_not_done_again(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = prepare(section(texts))
    prefix = held.prefix
    monkeypatch.setattr(text_data, "_write", None)
    assert prepare(section(texts)) == held
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"{prefix.name}.{suffix}" for suffix in ("bin", "idx", "idx.lock")
    ]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_text_is_prepared_again_where_a_file_is_gone(texts: Path, suffix: str) -> None:
    held = prepare(section(texts))
    gone = held.prefix.with_name(f"{held.prefix.name}.{suffix}")
    before = gone.read_bytes()
    gone.unlink()
    assert prepare(section(texts)) == held
    assert gone.read_bytes() == before


def prefix_of(data: DataSection) -> Path:
    return text_data.prefix_of(data, text_files(data))


def test_other_text_has_another_name(texts: Path) -> None:
    names = {prefix_of(section(texts)), prefix_of(section(texts, limit=5))}
    names.add(prefix_of(section(texts, "*.txt")))
    (texts / "a.txt").write_bytes(b"a longer text")
    names.add(prefix_of(section(texts)))
    os.utime(texts / "a.txt", ns=(1, 1))
    names.add(prefix_of(section(texts)))
    assert len(names) == 5
    assert not (texts.parent / "data").exists()


def test_several_processes_may_prepare_at_once(texts: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(prepare, [section(texts)] * 4))
    assert len(made) == 1
    assert len(documents(made.pop().prefix)) == 3


def test_the_standard_library_is_found_without_its_tests(tmp_path: Path) -> None:
    data = DataSection(text="python-stdlib", directory=tmp_path, max_text_bytes=300_000)
    files = text_files(data)
    assert sum(file.take_bytes for file in files) == 300_000
    assert files[0].path.name == "__future__.py"
    everything = text_files(data.model_copy(update={"max_text_bytes": 1 << 30}))
    directories = {part for file in everything for part in file.path.parts[:-1]}
    assert directories.isdisjoint({"test", "tests", "site-packages"})
    assert {"json", "asyncio"} <= directories
    tokens = np.fromfile(f"{prepare(data).prefix}.bin", dtype=np.uint16)
    assert len(tokens) == 300_000 + len(files)
    assert tokens.max() == END_OF_DOCUMENT


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, liver_hpc.recipes.text_data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- wrong text


def test_a_pattern_without_a_file_is_refused(texts: Path) -> None:
    data = section(texts).model_copy(update={"text": [str(texts / "*.txt"), "/no/such/*.py"]})
    with pytest.raises(ConfigError, match=r"no file matches '/no/such/\*.py'"):
        text_files(data)
    with pytest.raises(ConfigError, match=r"all files of \[\] are empty: 0 found"):
        text_files(data.model_copy(update={"text": []}))


def test_empty_files_are_left_out_and_nothing_else_is_refused(texts: Path) -> None:
    (texts / "a.txt").write_bytes(b"")
    assert [file.path.name for file in text_files(section(texts))] == ["b.txt", "c.txt"]
    with pytest.raises(ConfigError, match=r"all files of .* are empty: 1 found"):
        text_files(section(texts, "a.txt"))


def test_a_file_that_cannot_be_read_is_named(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = text_files(section(texts))
    monkeypatch.setattr(text_data, "text_files", lambda _data: listed)
    (texts / "a.txt").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a\.txt shrank while it was read"):
        prepare(section(texts))
    (texts / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: No such file"):
        prepare(section(texts))
    assert [path.suffix for path in (texts.parent / "data").iterdir()] == [".lock"]


def test_what_others_have_planted_where_text_is_tokenized_is_not_written_to(texts: Path) -> None:
    """In a directory of a group."""
    prefix, own = prefix_of(section(texts)), texts.parent / "own"
    own.write_text("mine")
    prefix.parent.mkdir()
    for end in ("bin", "idx", "bin.part", "idx.part"):
        prefix.with_name(f"{prefix.name}.{end}").symlink_to(own)
    prefix.with_name(f"{prefix.name}.idx").unlink()
    prepare(section(texts))
    assert own.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_named(texts: Path) -> None:
    (texts.parent / "data").write_bytes(b"a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare(section(texts))


def test_a_lock_that_is_never_released_is_not_waited_for_longer_than_allowed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "some.lock"
    with file_lock(path):
        waiting = r"waited 0.05 s for the process that has locked .*some\.lock"
        with pytest.raises(DeadlineError, match=waiting), file_lock(path, limit_s=0.05):
            pass
    with file_lock(path, limit_s=0.05):
        pass


# ---- tokens to samples


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """30 documents of 5 to 34 tokens, all tokens different."""
    path = tmp_path / "tokens"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    start = 0
    for length in range(5, 35):
        builder.add_document(np.arange(start, start + length), [length])
        start += length
    builder.finalize(f"{path}.idx")
    return path


def samples(prefix: Path, cache: str = "cache", count: int = 100, seed: int = 7) -> TokenSamples:
    return TokenSamples(Corpus((prefix,)), 16, [count], seed, prefix.parent / cache)


def test_orders_that_are_there_are_loaded_without_a_lock(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = samples(prefix, count=10)

    monkeypatch.setattr(fcntl, "flock", lambda *_args: pytest.fail("it takes a lock"))
    loaded = samples(prefix, count=10)
    assert torch.equal(made.sample(3)[0], loaded.sample(3)[0])


def megatrons(**more: object) -> GPTDatasetConfig:
    """What Megatron's own datasets are told of the same samples."""
    return GPTDatasetConfig(
        random_seed=7,
        sequence_length=16,
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **more,
    )


def all_tokens(made: TokenSamples, count: int = 100) -> torch.Tensor:
    return torch.stack([made.sample(index)[0] for index in range(count)])


def test_labels_are_the_next_tokens(prefix: Path) -> None:
    made = samples(prefix)
    made.sample(0)[2].zero_()  # a caller's own, also of the first one, which Megatron keeps
    for index in (0, 1, 50, 99):
        tokens, labels, mask = made.sample(index)
        assert tokens.shape == labels.shape == mask.shape == (16,)
        assert (tokens.dtype, labels.dtype, mask.dtype) == (torch.int64, torch.int64, torch.float32)
        assert torch.equal(tokens[1:], labels[:-1])
        assert torch.equal(mask, torch.ones(16))


def test_samples_are_megatrons_own(prefix: Path) -> None:
    low_level = IndexedDataset(str(prefix))
    indices = np.arange(30, dtype=np.int32)
    dataset = GPTDataset(low_level, str(prefix), indices, 100, Split.train, megatrons())
    expected = torch.stack([dataset[index]["tokens"] for index in range(100)])
    assert torch.equal(all_tokens(samples(prefix)), expected)


def test_a_process_that_is_not_rank_0_may_be_the_first(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = all_tokens(samples(prefix, "alone"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_args: 3)
    assert torch.equal(all_tokens(samples(prefix, "shared")), alone)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_args: 0)
    assert torch.equal(all_tokens(samples(prefix, "shared")), alone)


def test_several_processes_may_open_the_data_at_once(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    plain = GPTDataset._build_document_sample_shuffle_indices

    def counted(self: GPTDataset) -> object:
        built.append(self)
        return plain(self)

    monkeypatch.setattr(GPTDataset, "_build_document_sample_shuffle_indices", counted)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _number: samples(prefix), range(4)))
    assert len(built) == 1
    assert all(torch.equal(all_tokens(one), all_tokens(opened[0])) for one in opened[1:])


def test_the_order_depends_on_the_seed_and_on_the_data(prefix: Path) -> None:
    one, same, other = samples(prefix), samples(prefix), samples(prefix, seed=8)
    assert torch.equal(all_tokens(one), all_tokens(same))
    assert not torch.equal(all_tokens(one), all_tokens(other))
    replace_data(prefix)
    assert int(all_tokens(samples(prefix, "of another run")).max()) < 400


def replace_data(prefix: Path) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.arange(400), [400])
    builder.finalize(f"{prefix}.idx")


def test_a_run_whose_data_was_replaced_does_not_go_on_with_other_samples(prefix: Path) -> None:
    samples(prefix)
    replace_data(prefix)
    with pytest.raises(ConfigError, match=r"tokens\.idx is not what the run began with"):
        samples(prefix)


def test_an_index_is_read_whole_once_while_it_stays_as_it_is(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have hundreds of gigabytes, and each worker opens it."""
    samples(prefix)
    with monkeypatch.context() as unread:
        unread.setattr(hashlib, "file_digest", lambda *_args: pytest.fail("it is read again"))
        samples(prefix)
    os.utime(f"{prefix}.idx", ns=(1, 1))
    samples(prefix)  # the same bytes, put back


def test_there_are_as_many_samples_as_asked_for(prefix: Path) -> None:
    """585 tokens are 36 samples an epoch; more epochs follow."""
    made = samples(prefix, count=150)
    assert len(all_tokens(made, 150).unique(dim=0)) > 72
    for index in (150, -1):
        with pytest.raises(ConfigError, match=f"sample {index} does not exist: the run has 150"):
            made.sample(index)


def test_data_that_is_not_whole_is_refused(prefix: Path) -> None:
    tokens = Path(f"{prefix}.bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(ConfigError, match=r"tokens\.bin is truncated"):
        samples(prefix)
    tokens.unlink()
    with pytest.raises(ConfigError, match=r"tokens\.bin is missing"):
        samples(prefix)


def test_data_that_is_too_short_for_one_sample_is_refused(prefix: Path) -> None:
    with pytest.raises(ConfigError, match="has 585 tokens; a sample of 585 wants one more"):
        TokenSamples(Corpus((prefix,)), 585, [1], 7, prefix.parent / "cache")
    longest = TokenSamples(Corpus((prefix,)), 584, [1], 7, prefix.parent / "cache")
    assert longest.sample(0)[0].shape == (584,)


# ---- blends and splits


@dataclass(frozen=True)
class Mixed:
    """Two corpora whose tokens differ, and what Megatron's own builder makes of them."""

    prefixes: tuple[Path, ...]

    def ours(self, weights: Weights, split: str, counts: Sequence[int]) -> list[list[int]]:
        cache = self.prefixes[0].parent / "cache"
        corpus = Corpus(self.prefixes if weights else self.prefixes[:1], weights, split)
        made = TokenSamples(corpus, 16, counts, 7, cache)
        return [made.sample(index)[0].tolist() for index in range(sum(counts))]

    def megatrons(self, weights: Weights, split: str, counts: Sequence[int]) -> list[list[int]]:
        names = [str(path) for path in (self.prefixes if weights else self.prefixes[:1])]
        config = megatrons(blend=(names, None if weights is None else [*weights]), split=split)
        sizes = [*counts, 0, 0][:3]
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        with pytest.MonkeyPatch.context() as patch:
            # A test before this one in the process may have left a default group that joins nobody.
            patch.setattr(torch.distributed, "is_initialized", lambda: False)
            parts = builder.build()
        return [
            parts[part][index]["tokens"].tolist()
            for part, count in enumerate(counts)
            for index in range(count)
        ]


Weights = tuple[float, ...] | None


@pytest.fixture
def mixed(tmp_path: Path) -> Mixed:
    prefixes = []
    for number, documents_of_it in enumerate((60, 40)):
        path = tmp_path / f"corpus-{number}"
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
        for document in range(documents_of_it):
            length, first = 20 + 7 * (document % 5), 30_000 * number + 100 * document
            builder.add_document(np.arange(first, first + length), [length])
        builder.finalize(f"{path}.idx")
        prefixes.append(path)
    return Mixed(tuple(prefixes))


@pytest.mark.parametrize("weights", [None, (0.7, 0.3), (3.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("split", ["1", "80,20", "8,1.5,0.5"])
def test_blends_and_splits_are_megatrons_own(mixed: Mixed, weights: Weights, split: str) -> None:
    counts = (300, 50) if "," in split else (300,)
    expected = mixed.megatrons(weights, split, counts)
    assert mixed.ours(weights, split, counts) == expected
    assert mixed.ours(weights, split, counts) == expected, "from the orders that were kept"


def test_a_blend_draws_by_weight(mixed: Mixed) -> None:
    drawn = mixed.ours((3.0, 1.0), "1", [100])
    assert sum(tokens[0] >= 30_000 for tokens in drawn) == 25


def test_validation_shares_no_document_with_training(mixed: Mixed) -> None:
    drawn = mixed.ours(None, "80,20", [200, 40])
    training, validation = (
        {t for tokens in part for t in tokens} for part in (drawn[:200], drawn[200:])
    )
    assert training
    assert validation
    assert training.isdisjoint(validation)


def test_the_order_of_a_blend_is_made_once(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mixed.ours((0.7, 0.3), "80,20", [50, 10])
    monkeypatch.setattr(GPTDataset, "_build_document_sample_shuffle_indices", None)
    monkeypatch.setattr(BlendedDataset, "_build_indices", None)
    assert mixed.ours((0.7, 0.3), "80,20", [50, 10]) == expected
    with pytest.raises(TypeError):
        mixed.ours((0.6, 0.4), "80,20", [50, 10])


def test_a_share_that_is_too_short_for_one_sample_is_refused(mixed: Mixed) -> None:
    with pytest.raises(
        ConfigError, match=r"corpus-0 has 0 tokens for valid, by the split 999,1; a sample of 16"
    ):
        mixed.ours(None, "999,1", [10, 1])
