"""Which GPU a worker has, and what NCCL and CUDA are told of it: no GPU is needed for that."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.errors import LiverError
from liver_hpc.transport import gloo_waits
from liver_hpc.world import cpu_shim
from liver_hpc.world.device import (
    NCCL_CONDITIONS,
    NCCL_SETTINGS,
    Device,
    Room,
    open_device,
)

VARIABLES = (*NCCL_CONDITIONS, *NCCL_SETTINGS, "NCCL_HOSTID")
VARIABLES += ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "TORCH_NCCL_NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    symbolic: Any = importlib.import_module("torch.fx._symbolic_trace")
    told = "is_fx_symbolic_tracing"
    monkeypatch.setattr(symbolic, told, getattr(symbolic, told))  # put back in the end
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)


@pytest.mark.parametrize(
    ("local_rank", "gpu", "host"),
    [(0, 0, ""), (1, 1, ""), (2, 0, "-1"), (3, 1, "-1"), (4, 0, "-2")],
)
@pytest.mark.usefixtures("two_gpus")
def test_no_two_workers_of_one_gpu_are_of_one_host(local_rank: int, gpu: int, host: str) -> None:
    device = open_device(local_rank)
    assert device.torch_device == torch.device("cuda", gpu)
    assert device.late
    assert os.environ.get("NCCL_HOSTID", "") == (host and f"{socket.gethostname()}{host}")


def test_a_worker_that_wants_a_gpu_does_not_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LiverError, match=r"wanted a GPU, .* sees none on"):
        open_device(0, wanted_gpus=1)


@pytest.mark.parametrize(
    ("listed", "why"),
    [("0,1", r": 0,1\); Slurm before 26"), ("MIG-a,MIG-b,MIG-c", "one MIG instance")],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_worker_whose_gpu_is_gone_does_not_share_that_of_another(
    listed: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert open_device(1, wanted_gpus=3).torch_device.index == 1
    with pytest.raises(LiverError, match=rf"place 2 wanted .* with 3, and torch sees 2 .*{why}"):
        open_device(2, wanted_gpus=3)
    assert open_device(2, wanted_gpus=2).torch_device.index == 0  # by workers_per_node


@pytest.mark.parametrize(("given", "wanted"), [("4", 4), ("4,2", 4), ("", 1)])
def test_a_worker_on_a_cpu_has_the_threads_of_the_outermost_region(
    given: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    for module in (cpu_shim, gloo_waits):
        monkeypatch.setattr(module, "install", lambda: None)
    open_device(0)
    assert told == [wanted]


@pytest.mark.parametrize("given", ["0", "-1", "32(x2)", "all"])
def test_what_is_no_number_of_threads_is_told_by_its_name(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LiverError, match=f"OMP_NUM_THREADS is {re.escape(repr(given))}, wanted a"):
        open_device(0)


@pytest.mark.parametrize(("given", "told"), [("", "32"), ("1", "1"), ("32", "32")])
@pytest.mark.usefixtures("two_gpus")
def test_hardware_queues_are_as_many_as_there_are_unless_told(
    given: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if given:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    with caplog.at_level(logging.WARNING):
        open_device(0)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == told
    assert ("CUDA_DEVICE_MAX_CONNECTIONS is 1" in caplog.text) == (told == "1")


@pytest.mark.parametrize("name", ["CUDA_MODULE_LOADING", "NVTE_BATCH_MHA_P2P_COMM"])
@pytest.mark.parametrize("given", ["", "LAZY"])
@pytest.mark.usefixtures("two_gpus")
def test_what_a_handoff_wants_of_cuda_is_set_unless_told(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv(name, given)
    open_device(0)
    wanted = {"CUDA_MODULE_LOADING": "EAGER", "NVTE_BATCH_MHA_P2P_COMM": "1"}[name]
    assert os.environ[name] == (given or wanted)


@pytest.mark.parametrize(
    ("name", "given", "needed"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "2"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "0"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000", "0"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_what_a_recovery_needs_of_torch_is_set_whatever_was_told(
    name: str,
    given: str,
    needed: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, given)
    with caplog.at_level(logging.WARNING):
        open_device(0)
    assert os.environ[name] == needed
    (message,) = caplog.messages
    assert message.startswith(f"{name} is {given}, a run that recovers needs {needed}")


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_device_may_still_write_to_is_kept_until_it_has_ended(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And CUDA, which would wait for the device, is not asked to give memory back before."""
    emptied, ended = [], threading.Event()

    def done() -> bool:
        if fails and ended.is_set():
            raise RuntimeError("of a peer that has gone")
        return ended.is_set()

    lane = SimpleNamespace(mark=lambda: done)
    monkeypatch.setattr("liver_hpc.world.device.own_lane", lambda _device: lane)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(known() is None))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    device, gradients = Device(torch.device("cuda", 0)), torch.ones(8)
    known = weakref.ref(gradients)
    device.park([gradients])
    del gradients
    device.return_free_memory()
    assert known() is not None
    assert not emptied
    ended.set()
    device.return_free_memory()
    assert emptied == [True], "it is let go before CUDA is asked"


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that a GPU has had in use since its count began."""
    most = [0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (40, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: most[0])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _device: most.__setitem__(0, 0)
    )
    return most


def test_what_a_step_takes_is_told_by_steps_beside_which_there_was_nothing_else(
    most: list[int],
) -> None:
    """A target world that was called off must not count as what training needs: the next one would
    be refused for lack of room."""
    device = Device(torch.device("cuda", 0))

    def step(num_bytes: int) -> Room | None:
        most[0] = max(most[0], num_bytes)
        device.step_ended()
        return device.room()

    most[0] = 25
    assert device.room() == Room(65, 25), "a joiner's, which does not train"
    device.world_begins()
    assert step(30) == Room(60, 30)
    device.begin_beside(7)
    assert step(80) == Room(60, 30)
    device.step_ended()
    device.end_beside(7)  # in the middle of the next step, whose peak may be over
    assert step(5) == Room(60, 30)
    assert step(32) == Room(58, 32)
    device.return_free_memory()
    assert step(5) == Room(58, 32)
    assert step(31) == Room(59, 31)


def test_a_world_s_first_steps_beside_the_release_of_another_tell_nothing(most: list[int]) -> None:
    """An attempt at once would go by the beginning of a step, before its activations, or by two
    worlds' memory."""
    device = Device(torch.device("cuda", 0))
    device.begin_beside(2)
    device.world_begins()
    for num_bytes in (80, 80):
        most[0] = num_bytes
        device.step_ended()
        assert not device.knows_a_step(), "the source is still let go"
    device.end_beside(2)
    most[0] = 5
    assert not device.knows_a_step()
    device.step_ended()
    assert not device.knows_a_step(), "the end of a step alone"
    most[0] = 32
    device.step_ended()
    assert device.knows_a_step()
    assert device.room() == Room(58, 32)


def test_what_the_device_still_writes_to_is_beside_the_steps_until_it_has_ended(
    most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    lane = SimpleNamespace(mark=lambda: ended.is_set)
    monkeypatch.setattr("liver_hpc.world.device.own_lane", lambda _device: lane)
    device = Device(torch.device("cuda", 0))
    device.world_begins()
    device.begin_beside(2)
    device.park(object())
    device.end_beside(2)
    device.step_ended()
    most[0] = 80
    ended.set()
    device.step_ended()
    assert not device.knows_a_step()
    most[0] = 32
    device.step_ended()
    assert device.room() == Room(58, 32)


class Driver:
    """What libcuda answers of the default stream; `held` until it may."""

    def __init__(self, answer: int) -> None:
        self.said: list[str] = []
        self.held = threading.Event()
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: self.said.append(name)

    def cuStreamQuery(self, stream: Any) -> int:
        assert stream is None
        assert self.held.wait(20.0)
        return self._answer


@pytest.mark.parametrize(("answer", "has_work"), [(0, False), (600, True), (700, False)])
def test_a_device_has_work_while_training_s_stream_has(
    answer: int, has_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(answer)
    driver.held.set()
    monkeypatch.setattr("ctypes.CDLL", lambda _name: driver)
    assert Device(torch.device("cuda", 0)).has_work() == has_work
    assert driver.said[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_a_device_that_does_not_answer_has_work_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA lets other calls wait, too, while a launch waits for a place in its queue."""
    driver, device = Driver(0), Device(torch.device("cuda", 0))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: driver)
    monkeypatch.setattr("liver_hpc.world.device.ANSWERS_S", 0.1)
    assert [device.has_work() for _ in range(3)] == [True] * 3
    asking = [thread for thread in threading.enumerate() if thread.name == "has work"]
    assert len(asking) == 1, "it is not asked again before it has answered"
    driver.held.set()
    asking[0].join(10.0)
    monkeypatch.setattr("liver_hpc.world.device.ANSWERS_S", 10.0)
    assert not device.has_work()
    assert not Device(torch.device("cpu")).has_work()


@pytest.mark.usefixtures("two_gpus")
def test_workspaces_of_products_are_dropped_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: dropped.append("all"), raising=False
    )
    Device(torch.device("cpu")).drop_workspaces()
    assert not dropped
    open_device(0).drop_workspaces()
    assert dropped == ["all"]


@pytest.mark.usefixtures("two_gpus")
def test_a_worker_with_a_gpu_compiles_in_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ann")
    (tmp_path / "torchinductor_ann").symlink_to(tmp_path)
    open_device(0)
    assert Path(tempfile.gettempdir()).parent == tmp_path


KEEPS = """
import os, sys
from liver_hpc.world.device import compile_in_private

compile_in_private()
compile_in_private()  # as who was forked does
from torch._inductor import codecache

print(codecache.cache_dir(), codecache._HEADER_DIR, os.environ["TMPDIR"])
"""


@pytest.mark.parametrize("others", [True, False])
def test_torch_compiles_where_nobody_else_may_write(tmp_path: Path, others: bool) -> None:
    """In a process of its own, as torch asks for the directory once."""
    default = tmp_path / "torchinductor_LAB_ann"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "LOGNAME": "LAB\\ann"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if others:
        default.mkdir()
        default.chmod(0o777)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(default)
    command = [sys.executable, "-P", "-c", KEEPS]
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    kept, headers, temporary = map(Path, done.stdout.split())
    assert temporary == tmp_path, "a recipe's data may lie there"
    assert headers.parent == kept
    assert (kept == default) is not others
    private = kept.parent if others else kept
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert done.stderr.count(f"{default} may be written to by others (mode 777)") == others


COMPILES = """
import sys, threading
import torch
from liver_hpc.world.device import allow_concurrent_compile

if "in threads" in sys.argv:
    allow_concurrent_compile()
traced, called = threading.Event(), threading.Event()

def slow(values):
    traced.set()
    called.wait(60)
    return values + 1

compiled = torch.compile(lambda values: values * 2, backend="eager")
tracing = threading.Thread(target=torch.fx.symbolic_trace, args=(slow,))
tracing.start()
traced.wait(60)
try:
    print(float(compiled(torch.ones(1))))
finally:
    called.set()
"""


@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.long), ["in threads"]])
def test_a_thread_calls_what_is_compiled_while_another_one_is_traced(words: list[str]) -> None:
    """In a process of its own, as what stands for CUDA makes torch.compile do nothing."""
    command = [sys.executable, "-P", "-c", COMPILES, *words]
    done = subprocess.run(command, text=True, capture_output=True, timeout=100, check=False)
    if words:
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    else:
        assert "symbolically trace" in done.stderr
