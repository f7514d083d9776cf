"""This process: the environment it hands on, its descriptors, threads and garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from liver_hpc.errors import LiverError

ENOUGH = 65_536
"""Of a hard limit without bounds no more is taken: children inherit it, and some close them all."""

_PIDFD_OPEN = 434
"""The number of the system call, on all machines."""
_LOOK_S = 0.05

VMSTAT = Path("/proc/vmstat")

CORES = "LIVER_CORES"
"""Cores of which a worker takes one, by its place on the node: "0,1"."""

# What Slurm, a PMI server, Open MPI or MPICH's process manager tell the processes of one launch.
# Inherited by another one they give it the wrong nodes, ranks and sockets.
_FOREIGN_PREFIXES = ("SLURM_", "SRUN_", "PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER")
_USER = ("SLURM_JWT", "SLURM_SACK_SOCKET", "SLURM_SACK_KEY", "SLURM_SACK_JWKS")
_TOKEN = "SLURM_JWT"
"""Slurm's commands show it in the place of the user's credential. slurmd takes none, so that srun
starts nothing; it expires, by default after half an hour; and within a job nobody needs it."""
_KEPT = frozenset(_CLUSTER + _USER)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what belongs to the launch that this process came from.

    What says where the cluster is, and by what the user is known to it, stays: it does not say what
    we are in it. Within a job that is no token.
    """
    kept = _KEPT - {_TOKEN} if "SLURM_JOB_ID" in environment else _KEPT
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not name.startswith(_FOREIGN_PREFIXES)
    }


def raise_descriptor_limit() -> None:
    """Raises the soft limit, often 1,024, towards the hard one: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raise_soft_limits() -> None:
    """Raises the soft limits of this user's threads on this machine, and of the CPU time of a
    process, to the hard ones. Slurm hands on those of the shell that a job was submitted from, and
    a login node's may let nobody compute for more than minutes."""
    for which in (resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
        soft, hard = resource.getrlimit(which)
        if soft != hard:
            resource.setrlimit(which, (hard, hard))


def collect_seldom() -> None:
    """Lets cyclic garbage lie for longer: of the hundred thousands of
    objects that thousands of workers' messages are for the length of a handoff the collector would
    look through all, and find next to nothing."""
    gc.set_threshold(500_000, 20, 100)


def take_core(place: int) -> None:
    """Keeps this process to one of the cores that the environment lists, if it does (`CORES`), with
    all threads and processes that it will start. Raises OSError for a core that it may not use."""
    cores = [int(core) for core in os.environ.get(CORES, "").split(",") if core]
    if cores:
        os.sched_setaffinity(0, {cores[place % len(cores)]})


def drop_unwritable_output() -> None:
    """From now on what this process prints and cannot write, as onto a disk that is full, is
    dropped: neither `print` nor a flush raises OSError. Not of a stream without a descriptor."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            output = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
        except OSError:
            continue
        by_line = stream.line_buffering or stream.write_through
        text = io.TextIOWrapper(output, stream.encoding, stream.errors, line_buffering=by_line)
        setattr(sys, name, text)


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def quiet_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread to which the kernel delivers no signal of the process.

    Not for a thread that starts processes, unless by `child.Child`: others would inherit its
    blocked signals. Raises LiverError where this user or machine has no thread left.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return start_thread(target, name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread. Raises LiverError where this user or machine has no thread left."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise LiverError(f"{name}: {error}; see ulimit -u, and pids.max") from error
    return thread


def end_of(pid: int) -> int:
    """A descriptor that is readable once a process has ended, for the caller to close. Raises
    OSError where there is no such process.

    By the system call itself: `os.pidfd_open` is missing where Python was built with older headers,
    as conda's is. Before Linux 5.3, and where a container forbids the call, a thread looks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(_PIDFD_OPEN, ctypes.c_long(pid), ctypes.c_long(0)))
    if descriptor >= 0:
        return descriptor
    number = ctypes.get_errno()
    if number not in (errno.ENOSYS, errno.EPERM):
        raise OSError(number, os.strerror(number))
    return _end_looked_for(pid)


def _end_looked_for(pid: int) -> int:
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    end, other_end = os.pipe()

    def look() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_LOOK_S)
        os.close(other_end)

    quiet_thread(look, f"end-of-{pid}")
    return end


def kills_for_memory() -> int:
    """How many processes of this node, whosever, the kernel has ended for want of memory, theirs or
    the node's, since it was started; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        for line in VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def all_at_once(calls: Iterable[Callable[[], None]], name: str, limit_s: float) -> None:
    """Makes each call in a quiet thread of its own, and waits for all of them, for `limit_s` at
    most."""
    threads = [quiet_thread(call, name) for call in calls]
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected while a worker imports, and what was imported is never walked again.

    torch and megatron make hundreds of thousands of objects, nearly all of which stay; looking
    through them again and again is a fifth of the time of the import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
