"""The device of a worker: CUDA with NCCL, or the CPU with gloo. Decided here alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import getpass
import importlib
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.files import shared_with
from liver_hpc.host.process import quiet_thread
from liver_hpc.transport import gloo_waits
from liver_hpc.transport.lane import Lane, new_lane, own_lane
from liver_hpc.world.host_memory import pinned_memory, plain_memory

log = logging.getLogger(__name__)

NCCL_CONDITIONS = {
    # What fails or is late is aborted, and counts as done: see `GroupBook.check`. torch's default
    # ends the process, which has a source world that could go on.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # A work's wait is queued on the device; the host looks with deadlines of its own.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Else a thread ends the process when NCCL is slow in giving up, and asks a store for signals
    # that has been closed since.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # torch sleeps four times as long before it aborts what has failed: a minute by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""What torch is told in a worker, whatever the environment says: no recovery goes without."""
NCCL_SETTINGS = {
    # All paths of a group's collectives are opened while it connects, beside training; else each is
    # when it is first used, in the first step of a world that has taken over. For those of messages
    # and of all-to-all see `groups.Group.pairs`.
    "NCCL_RUNTIME_CONNECT": "0",
    # Transformer Engine's attention over a context-parallel group else sends in pairs, for which
    # torch makes a communicator each when it is first used: the group's store is closed by then.
    "NVTE_BATCH_MHA_P2P_COMM": "1",
}
"""What NCCL and Transformer Engine are told in a worker, where the environment does not say
otherwise."""
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_QUEUES = "32"
"""Of a device's hardware queues; CUDA's default is 8. Streams that share one wait for each other:
see `transport/lane.py`."""
_LOADING = "CUDA_MODULE_LOADING"
_ALL_AT_ONCE = "EAGER"
"""Else CUDA loads a kernel as it is first launched, for which it may wait until the device is idle:
with a collective under way whose peer does the same, for ever. It takes 5 s and 1 GB of the device
(docs/explanation/gpu.md)."""
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "OMP_NUM_THREADS"
_HOST_ID = "NCCL_HOSTID"
"""NCCL takes ranks for processes of one host where this is the same for them."""
ABORTED_ENDS_S = 10.0
"""How long the device may take to come to the end of what has been aborted."""
ANSWERS_S = 1.0
"""How long CUDA may take to say whether a stream has work."""
_NOT_READY = 600
_RELAXED = 2
"""CUDA_ERROR_NOT_READY, CU_STREAM_CAPTURE_MODE_RELAXED: what is asked disturbs no capture."""


class Room(NamedTuple):
    """peak_bytes: the most that this process has in use in a step. free_bytes: what is left of the
    device while it has as much in use."""

    free_bytes: int
    peak_bytes: int


class Device:
    """A torch device, and the process-group backend that goes with it.

    ran_out: whether its memory did in a PREPARE, which by `room` had enough.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.ran_out = False
        self._parked: list[tuple[Callable[[], bool], object]] = []
        self._peak_bytes: list[int] = []  # of the last step beside which there was nothing else
        self._beside: set[int] = set()  # the attempts that have memory beside the world that trains
        self._disturbed = threading.Event()  # the peak that is counted is not that of a step alone
        self._asked = threading.Lock()

    @property
    def backend_name(self) -> str:
        return "nccl" if self.torch_device.type == "cuda" else "gloo"

    @property
    def late(self) -> bool:
        """Whether the device works on what was launched when the call has returned."""
        return self.torch_device.type != "cpu"

    def enter(self) -> None:
        """Makes this the calling thread's device. Every thread that touches tensors calls it once,
        because torch keeps the current CUDA device per thread."""
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)

    def in_training_lane(self) -> AbstractContextManager[None]:
        """What the calling thread launches inside goes where training's work goes."""
        if self.torch_device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.torch_device))

    def synchronize(self) -> None:
        """Waits for all work queued on the device, without a deadline: not for a handoff."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def has_work(self) -> bool:
        """Whether something that training has launched is not done; from any thread.

        Where a launch waits until CUDA's queue has a place again, other calls of the process may
        wait for it, too. So CUDA is asked in a thread of its own; no answer in ANSWERS_S is a yes.
        """
        if self.torch_device.type != "cuda":
            return False
        answers: list[bool] = []

        def ask() -> None:
            with self._asked:
                answers.append(_stream_has_work(self.torch_device.index or 0))

        if not self._asked.locked():  # else who asked before has no answer yet
            quiet_thread(ask, "has work").join(ANSWERS_S)
        return not answers or answers[0]

    def new_lane(self) -> Lane:
        """A lane of its own."""
        return new_lane(self.torch_device)

    def finish(self, deadline: Deadline) -> None:
        """Waits until the device has done all that the calling thread has launched so far.

        Raises DeadlineError; RuntimeError where that work failed.
        """
        own_lane(self.torch_device).finish(deadline)

    def aborted_has_ended(self) -> bool:
        """Waits, after an abort, until the device has done all that the calling thread has
        launched, or failed in it. False where that takes longer than ABORTED_ENDS_S."""
        clock = SystemClock()
        try:
            self.finish(Deadline.after(clock, ABORTED_ENDS_S, "what was aborted"))
        except DeadlineError:
            return False
        except RuntimeError:
            return True
        return True

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] of uint8 on the host, with which the device exchanges bytes in a lane, beside
        the calling thread."""
        if self.torch_device.type == "cuda":
            return pinned_memory(num_bytes)
        return plain_memory(num_bytes)

    def world_begins(self) -> None:
        """Another one trains from now on."""
        self._peak_bytes.clear()
        self._step_begins()

    def step_ended(self) -> None:
        """Of the world that trains."""
        self._unpark()
        if self.torch_device.type == "cuda" and not self._disturbed.is_set():
            self._peak_bytes[:] = [torch.cuda.max_memory_allocated(self.torch_device)]
        self._step_begins()

    def _step_begins(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._disturbed.clear()
        if self._beside or self._parked:
            self._disturbed.set()

    def knows_a_step(self) -> bool:
        """Whether a step of the world that trains has ended beside which there was nothing else: by
        its peak `room` goes. True where the device does not tell."""
        return self.torch_device.type != "cuda" or bool(self._peak_bytes)

    def begin_beside(self, generation: int) -> None:
        """An attempt takes memory beside the world that trains, until `end_beside`."""
        self._beside.add(generation)
        self._disturbed.set()

    def end_beside(self, generation: int) -> None:
        """All that the attempt had is let go, or the source's is: gives it back."""
        self.return_free_memory()
        self._beside.discard(generation)

    def room(self) -> Room | None:
        """What there is beside the world that trains; None where the device does not tell."""
        if self.torch_device.type != "cuda":
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        most_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        peak_bytes = self._peak_bytes[0] if self._peak_bytes else most_bytes
        cached_bytes = torch.cuda.memory_reserved(self.torch_device)
        return Room(free_bytes + cached_bytes - peak_bytes, peak_bytes)

    def free_bytes(self) -> int | None:
        """What can be allocated now; None where the device does not tell."""
        if self.torch_device.type != "cuda":
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
        return free_bytes + reserved_bytes - torch.cuda.memory_allocated(self.torch_device)

    def drop_workspaces(self) -> None:
        """Frees what cuBLAS keeps for each thread and stream in which a product was computed, 32
        MiB on Hopper. The next product allocates it again.

        Nothing may compute meanwhile in another thread of this process.
        """
        if self.torch_device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()

    def park(self, held: object, lane: Lane | None = None) -> None:
        """Keeps memory that the device may still write to, until it has done all that a lane holds
        by now, and somebody calls `return_free_memory`. lane: None for the calling thread's."""
        self._parked.append(((lane or own_lane(self.torch_device)).mark(), held))

    def return_free_memory(self) -> None:
        """Gives back what is held but not used: pages of the heap (glibc keeps them otherwise),
        blocks that belong to the streams of lanes that have ended. Not those while something is
        parked: CUDA would wait, without a deadline, for the device."""
        self._unpark()
        gc.collect()
        if self.torch_device.type == "cuda" and not self._parked:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)  # it was that of two worlds
            self._disturbed.set()
        with contextlib.suppress(OSError, AttributeError):  # another libc: nothing to trim
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def _unpark(self) -> None:
        for parked in [*self._parked]:
            if _ended(parked[0]):
                with contextlib.suppress(ValueError):  # another thread has seen it, too
                    self._parked.remove(parked)


def _stream_has_work(index: int) -> bool:
    """Of the default stream of this process's GPU of an index. Past torch, which may keep the
    interpreter's lock while CUDA lets a call wait. Work that has failed is over."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, relaxed = ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
    cuda.cuCtxSetCurrent(context)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    try:
        return bool(cuda.cuStreamQuery(None) == _NOT_READY)
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(index)


def _ended(done: Callable[[], bool]) -> bool:
    """Of a mark (transport/lane.py): work that has failed is over, too."""
    try:
        return done()
    except RuntimeError:
        return True


def allow_concurrent_compile() -> None:
    """Lets a thread call what torch.compile has made while another one compiles: PREPARE's, which
    rehearses, and training's. To be called before anything is decorated, as Megatron does in its
    import.

    torch notes in one flag of the process that FX traces something, as it does when it compiles,
    and a compiled function that is called meanwhile raises.
    """
    symbolic: Any = importlib.import_module("torch.fx._symbolic_trace")
    symbolic.is_fx_symbolic_tracing = lambda: False


def compile_in_private() -> None:
    """Has what torch.compile makes lie where nobody but this user may write: it is executed from
    there, whoever wrote it. To be called before torch's compiler is imported, as Megatron does.

    By default it lies under a name in the directory for temporary files that anybody may have taken
    before; then this process, and those that it forks, have such a directory of their own.
    """
    path = _compile_directory()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if why := shared_with(path.lstat()):
        # Whatever the variable says, precompiled headers lie under the default name.
        tempfile.tempdir = tempfile.mkdtemp(prefix="liver-")
        if os.environ.get(_COMPILED) == str(path):  # so torch sets it as its compiler is imported
            del os.environ[_COMPILED]
        text = "%s %s: torch has %s in its place, a new one with each start; remove the former"
        log.warning(text, path, why, tempfile.tempdir)


def _compile_directory() -> Path:
    """torch.compile's by default, which torch does not tell without making it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def open_device(local_rank: int, wanted_gpus: int = 0) -> Device:
    """Claims this worker's device: CUDA device `local_rank` where there is one, else the CPU.

    A node with fewer GPUs than workers has several on one, as a workstation on which a run is tried
    out: NCCL then works between them as if between hosts, through sockets. wanted_gpus: those that
    the node was asked for with. Raises LiverError where one of them was to be this worker's and is
    not seen, where the GPU takes no further process, and for a number of threads that is none.
    """
    queues = os.environ.setdefault(_QUEUES, _MOST_QUEUES)  # before anything opens CUDA
    os.environ.setdefault(_LOADING, _ALL_AT_ONCE)
    if torch.cuda.is_available():
        allow_concurrent_compile()
        compile_in_private()
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        for name, value in NCCL_CONDITIONS.items():
            if (given := os.environ.get(name, value)) != value:
                log.warning("%s is %s, a run that recovers needs %s: set so", name, given, value)
            os.environ[name] = value
        if queues != _MOST_QUEUES:
            log.warning(
                "%s is %s: what a handoff does may wait on the device behind training, until its "
                "deadline; wanted %s",
                *(_QUEUES, queues, _MOST_QUEUES),
            )
        seen = torch.cuda.device_count()
        if seen <= local_rank < wanted_gpus:
            raise LiverError(_too_few_gpus(local_rank, seen, wanted_gpus))
        round_of_gpus, index = divmod(local_rank, seen)
        if round_of_gpus > 0:
            log.warning("GPU %d has a worker already: what crosses between them is slow", index)
            # NCCL refuses two ranks of one host on one GPU.
            os.environ.setdefault(_HOST_ID, f"{socket.gethostname()}-{round_of_gpus}")
        device = torch.device("cuda", index)
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise LiverError(
                f"GPU {index} takes no further process: {text}. If its memory is free, CUDA's MPS "
                f"has no queues left: each worker asks for {queues}, set {_QUEUES} to fewer"
            ) from error
        return Device(device)
    if wanted_gpus:
        built = torch.version.cuda
        what = "is built without CUDA" if built is None else f"is built for CUDA {built}"
        raise LiverError(
            f"wanted a GPU, as the run file has gpus_per_node; torch {torch.__version__} {what}, "
            f"and sees none on {_listed_gpus()}"
        )
    given = os.environ.get(_THREADS) or "1"  # empty, where it was to be another's value
    threads = given.partition(",")[0].strip()  # "4,2": those of nested regions follow
    if not threads.isdecimal() or int(threads) == 0:
        raise LiverError(f"{_THREADS} is {given!r}, wanted a number of threads of at least 1")
    torch.set_num_threads(int(threads))
    from liver_hpc.world import cpu_shim

    cpu_shim.install()
    gloo_waits.install()
    return Device(torch.device("cpu"))


def _too_few_gpus(local_rank: int, seen: int, wanted: int) -> str:
    listed = _listed_gpus()
    if "MIG-" in listed:
        listed += (
            "; CUDA shows a process one MIG instance: workers that share a node need whole GPUs"
        )
    else:
        listed += (
            "; Slurm before 26.05.3 gives a step fewer than its job has where the job's cores are "
            "of fewer sockets than its GPUs: ask for `exclusive: true`, or more cpus_per_node"
        )
    return (
        f"the worker in place {local_rank} wanted a GPU of its own; its node was asked for with "
        f"{wanted}, and torch sees {seen} on {listed}"
    )


def _listed_gpus() -> str:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return f"{socket.gethostname()} (CUDA_VISIBLE_DEVICES: {listed})"


def gpu_addresses() -> list[str]:
    """Of each GPU that this process sees, where it is on the PCI bus, such as "0000:65:00.0"; none
    where there is no GPU, or torch does not say."""
    gpus = range(torch.cuda.device_count())
    found: list[Any] = [torch.cuda.get_device_properties(gpu) for gpu in gpus]
    try:
        return [f"{g.pci_domain_id:04x}:{g.pci_bus_id:02x}:{g.pci_device_id:02x}.0" for g in found]
    except AttributeError:
        return []
