"""The metrics file: read while it is written, whole when its writer is killed, calm when the disk
is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import MetricsSection
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.report.store import MetricsWriter, read_run
from tests.unit.report.rows import baseline, reconfiguration, step

ONLY_BY_HAND = MetricsSection(reserve_bytes=0, flush_interval_s=3600)
RESERVE_BYTES = 1000
LIMIT_S = 30.0


def open_writer(path: Path, **extra: Any) -> MetricsWriter:
    return MetricsWriter(path, ONLY_BY_HAND, {"host": "here"}, **extra)


def numbers(path: Path) -> list[int]:
    return [record.step for record in read_run(path).steps]


@contextmanager
def writer_process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.report.writer_process", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    return facts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.h5"


def test_records_come_back_as_they_were(path: Path) -> None:
    steps = [step(number) for number in range(5)]
    attempt, measured = reconfiguration(detail="gone: ö"), baseline()
    with closing(open_writer(path)) as writer:
        for record in steps:
            writer.add_step(record)
        writer.add_reconfiguration(attempt)
        writer.add_baseline(measured)
    records = read_run(path)
    assert records.steps == steps
    assert repr(records.reconfigurations) == repr([attempt])  # NaN is not equal to itself
    assert records.baselines == [measured]
    assert records.attributes == {"host": "here"}


def test_attributes_of_any_length_come_back(path: Path) -> None:
    attributes = {
        "config": "layers: 12  # ü\n" * 4000,
        "more": "x" * 300_000,
        "empty": "",
        "zero": "a\0b",
    }
    MetricsWriter(path, ONLY_BY_HAND, attributes).close()
    assert read_run(path).attributes == attributes | {"zero": "a\N{REPLACEMENT CHARACTER}b"}


def test_after_the_end_any_tool_opens_the_file(path: Path) -> None:
    with closing(open_writer(path)) as writer:
        writer.add_step(step(3))
        writer.add_reconfiguration(reconfiguration())
    with h5py.File(path, "r+") as file:  # as one that nobody writes to
        assert file["steps"]["step"].tolist() == [3]
        assert file["steps"]["phase"].tolist() == [b""]
        assert file["reconfigurations"]["digest_equal"].tolist() == [True]
        assert h5py.check_string_dtype(file["steps"].dtype["phase"]).encoding == "utf-8"


def test_a_run_without_a_step_has_a_file(path: Path) -> None:
    with closing(open_writer(path)):
        records = read_run(path)
    assert (records.steps, records.reconfigurations, records.baselines) == ([], [], [])


def test_rows_reach_the_file_by_time_even_if_nothing_follows(path: Path) -> None:
    settings = MetricsSection(reserve_bytes=0, flush_interval_s=0.02)
    with closing(MetricsWriter(path, settings, {})) as writer:
        writer.add_step(step(0))
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the first row")
        poll_until(lambda: numbers(path) == [0], deadline)
        writer.add_step(step(1))
        poll_until(lambda: numbers(path) == [0, 1], deadline)


def test_rows_wait_for_their_interval(path: Path) -> None:
    with closing(open_writer(path)) as writer:
        writer.add_step(step(0))
        assert numbers(path) == []
        writer.flush()
        assert numbers(path) == [0]


def test_many_threads_may_add_and_flush(path: Path) -> None:
    def add(first: int) -> None:
        for number in range(first, first + 200):
            writer.add_step(step(number))
            if number % 50 == 0:
                writer.flush()

    with closing(open_writer(path)) as writer:
        threads = [threading.Thread(target=add, args=(200 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert sorted(numbers(path)) == list(range(1600))


def test_a_later_life_of_the_run_appends_and_knows_the_generations_of_the_earlier(
    path: Path,
) -> None:
    """A step that is done again is there twice, in the order of writing."""
    known = []
    for life in range(3):
        with closing(open_writer(path)) as writer:
            known.append(writer.last_generation)
            for number in (life, life + 1):
                writer.add_step(step(number, generation=2 * life))
            writer.add_reconfiguration(reconfiguration(generation=2 * life + 1))
    assert known == [-1, 1, 3]
    assert numbers(path) == [0, 1, 1, 2, 2, 3]
    assert [row.generation for row in read_run(path).reconfigurations] == [1, 3, 5]
    assert list(path.parent.iterdir()) == [path]


def test_a_later_life_finds_the_rows_of_one_that_was_killed(path: Path) -> None:
    with writer_process("endless", str(path)) as process:
        heard(process)
        deadline = Deadline.after(SystemClock(), LIMIT_S, "rows")
        poll_until(lambda: len(numbers(path)) > 3, deadline)
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    before = numbers(path)
    with closing(open_writer(path)) as writer:
        writer.add_step(step(7))
    assert numbers(path) == [*before, 7]


def test_earlier_rows_wait_for_a_disk_with_space(path: Path) -> None:
    with closing(open_writer(path)) as writer:
        writer.add_step(step(1))
    config = MetricsSection(reserve_bytes=RESERVE_BYTES, flush_interval_s=3600)
    free = [RESERVE_BYTES - 1]
    with closing(MetricsWriter(path, config, {"host": "there"}, lambda _: free[0])) as writer:
        writer.add_step(step(2))
        writer.flush()
        assert "disk is full" in writer.error
        assert numbers(path) == [1]
        free[0] = RESERVE_BYTES
    assert numbers(path) == [1, 2]
    assert read_run(path).attributes == {"host": "there"}


def test_a_file_that_cannot_be_gone_on_with_is_kept(path: Path) -> None:
    path.write_bytes(b"not HDF5")
    with closing(open_writer(path)) as writer:
        writer.add_step(step(1))
    assert path.with_name("metrics.1.h5").read_bytes() == b"not HDF5"
    assert numbers(path) == [1]


def test_after_the_end_a_record_comes_too_late(path: Path) -> None:
    writer = open_writer(path)
    writer.close()
    writer.close()
    before = path.read_bytes()
    writer.flush()
    assert path.read_bytes() == before
    with pytest.raises(LiverError, match="too late"):
        writer.add_step(step(0))


# ---- readers, and the end of the writer


@pytest.mark.parametrize("locking", ["TRUE", "FALSE", "BEST_EFFORT"])
def test_a_reader_sees_the_file_grow_and_does_not_stop_the_writer(path: Path, locking: str) -> None:
    with writer_process("endless", str(path), HDF5_USE_FILE_LOCKING=locking) as process:
        heard(process)
        # A reader with a lock of its own, which it keeps.
        code = "import h5py, sys; f = h5py.File(sys.argv[1], swmr=True); print(1); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"},
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"1\n"
            for _ in range(20):
                facts = heard(process)
                assert facts["error"] == ""
                found = numbers(path)
                assert len(found) >= facts["steps"]
                assert found == list(range(len(found)))
            reader.communicate(b"\n", LIMIT_S)


def test_the_file_is_whole_after_the_writer_was_killed(path: Path) -> None:
    with writer_process("endless", str(path)) as process:
        for _ in range(150):
            facts = heard(process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    records = read_run(path)
    found = len(records.steps)
    assert found >= facts["steps"]
    assert records.steps == [step(number) for number in range(found)]
    generations = [record.generation for record in records.reconfigurations]
    assert generations == list(range(len(generations)))
    assert records.attributes == {"host": "here"}


def test_a_reader_in_the_same_process_leaves_the_writer_alone(path: Path) -> None:
    with closing(open_writer(path)) as writer:
        for number in range(5):
            writer.add_step(step(number))
            writer.flush()
            assert numbers(path) == list(range(number + 1))
    assert writer.error == ""


# ---- a full disk


class Disk:
    """Says how much is free."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def __call__(self, directory: Path) -> int:
        return self.free_bytes


def careful_writer(path: Path, disk: Callable[[Path], int], waiting_bytes: int) -> MetricsWriter:
    settings = MetricsSection(reserve_bytes=RESERVE_BYTES, flush_interval_s=3600)
    return MetricsWriter(path, settings, {}, disk, waiting_bytes)


def test_nothing_is_written_into_the_reserve_and_all_once_there_is_room(path: Path) -> None:
    disk = Disk(RESERVE_BYTES)
    with closing(careful_writer(path, disk, 2**20)) as writer:
        writer.add_step(step(0))
        writer.flush()
        disk.free_bytes = RESERVE_BYTES - 1
        writer.add_step(step(1))
        writer.add_step(step(2))
        writer.flush()
        for part in (str(path), "wanted 1000 bytes free, got 999", "2 rows wait"):
            assert part in writer.error
        assert numbers(path) == [0]
        disk.free_bytes = RESERVE_BYTES
        writer.flush()
        assert writer.error == ""
        assert numbers(path) == [0, 1, 2]
    assert writer.dropped == 0


def test_a_disk_that_is_full_from_the_start_gets_the_file_later(path: Path) -> None:
    disk = Disk(0)
    with closing(careful_writer(path, disk, 2**20)) as writer:
        assert "got 0" in writer.error
        writer.add_step(step(0))
        writer.flush()
        assert not path.exists()
        disk.free_bytes = RESERVE_BYTES
        writer.flush()
        assert numbers(path) == [0]


def test_memory_is_bounded_and_keeps_the_newest(path: Path) -> None:
    disk = Disk(0)
    with closing(careful_writer(path, disk, waiting_bytes=1000)) as writer:
        for number in range(100):
            writer.add_step(step(number))
        writer.flush()
        kept = 100 - writer.dropped
        assert 5 < kept < 30
        assert f"{kept} rows wait in memory, {writer.dropped} older ones" in writer.error
        disk.free_bytes = RESERVE_BYTES
    assert numbers(path) == list(range(100 - kept, 100))


def test_what_cannot_be_written_at_the_end_is_told(path: Path) -> None:
    disk = Disk(RESERVE_BYTES)
    writer = careful_writer(path, disk, 2**20)
    disk.free_bytes = 0
    writer.add_step(step(0))
    writer.close()
    assert "1 rows" in writer.error
    assert numbers(path) == []


def test_a_directory_that_has_gone_is_an_error_and_raises_nothing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "gone" / "metrics.h5")
    writer.add_step(step(0))
    writer.close()
    assert "No such file or directory" in writer.error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a megabyte."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def check_full(no_room: str, directory: Path, reason: str, then: str) -> None:
    """The rows that reached the file stay readable; the process ends in order either way."""
    path = directory / "metrics.h5"
    with writer_process(no_room, str(path), then) as process:
        facts = heard(process)
        assert process.wait(LIMIT_S) == 0
    assert reason in facts["error"]
    assert 0 < facts["inside"] < facts["added"]
    expected = facts["added"] + 1 if then == "recover" else facts["inside"]
    assert numbers(path) == list(range(expected))
    assert bool(facts["at_end"]) == (then == "stay")
    assert [entry.name for entry in directory.iterdir()] == ["metrics.h5"]


@pytest.mark.parametrize("then", ["recover", "stay"])
def test_a_full_file_system_loses_no_row_that_was_written(small_disk: Path, then: str) -> None:
    check_full("disk", small_disk, "No space left on device", then)


@pytest.mark.parametrize("then", ["recover", "stay"])
def test_a_limit_on_file_size_loses_no_row_that_was_written(tmp_path: Path, then: str) -> None:
    check_full("limit", tmp_path, "File too large", then)


def test_a_disk_that_takes_nothing_does_not_spoil_the_end(path: Path) -> None:
    with writer_process("close", str(path)) as process:
        facts = heard(process)
        assert process.wait(LIMIT_S) == 0
    assert "File too large" in facts["error"]
    assert numbers(path) == [0]


# ---- files that cannot be read


def test_a_missing_file_is_told(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.h5: there is no such file"):
        read_run(path)


@pytest.mark.parametrize("content", [b"", b"steps: 12\n" * 500])
def test_a_file_of_another_kind_is_told(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"metrics\.h5 is no .*it is not HDF5"):
        read_run(path)


def test_a_directory_is_told(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        read_run(path)


def test_an_hdf5_file_of_something_else_is_told(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)
    with pytest.raises(ConfigError, match="no table /steps"):
        read_run(path)


def test_a_file_of_another_version_is_told(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("steps", shape=(0,), dtype=[("step", "i8"), ("loss", "f8")])
    with pytest.raises(ConfigError, match=r"/steps lacks \['ended_s', .*another version"):
        read_run(path)


def test_a_truncated_file_is_told_wherever_it_was_cut(path: Path) -> None:
    with closing(open_writer(path)) as writer:
        for number in range(1000):
            writer.add_step(step(number))
        writer.flush()
        writer.add_reconfiguration(reconfiguration())
        writer.flush()
        not_closed = path.read_bytes()
    for whole in (path.read_bytes(), not_closed):
        for size in {*range(1, 60), *range(60, len(whole), 997), len(whole) - 1}:
            path.write_bytes(whole[:size])
            with pytest.raises(ConfigError, match=r"metrics\.h5 is (truncated|no metrics file)"):
                read_run(path)
        path.write_bytes(whole)
        assert len(read_run(path).steps) == 1000
