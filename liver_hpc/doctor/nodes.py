"""Checks that need nodes: each asks probes, and judges what they answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.doctor.checks import Check, Level, Result, failed, passed, skipped, warned
from liver_hpc.doctor.probe import ASKERS_TOKEN, Said, versions
from liver_hpc.doctor.step import Probes
from liver_hpc.errors import LiverError
from liver_hpc.run.secret import create_secret

MOST_SKEW_S = 0.5

_NODE_S = 30.0
_MEET_S = 60.0
_BYTES_S = 120.0
_SEEN_S = 15.0


@dataclass(frozen=True)
class Nodes:
    """What the checks of nodes work with. directory: the doctor's own, in the runs directory."""

    probes: Probes
    names: tuple[str, ...]
    directory: Path

    def one(self, node: str, probe: str, limit_s: float, **arguments: Any) -> Said:
        return self.probes.ask([node], probe, limit_s, **arguments)[node]

    def each(self, probe: str, **arguments: Any) -> Result:
        """The worst of what the nodes find about themselves, and who says what."""
        answers = self.probes.ask(self.names, probe, _NODE_S, **arguments)
        results = [
            (name, Result(Level(said["level"]), said["found"], said["advice"]))
            for name, said in sorted(answers.items())
        ]
        worst = max((result for _, result in results), key=lambda r: list(Level).index(r.level))
        who: dict[str, list[str]] = {}
        for name, result in results:
            if result.level is worst.level:
                who.setdefault(result.found, []).append(name)
        told = [f"{', '.join(names)}: {found}" for found, names in who.items()]
        return replace(worst, found="; ".join(told))


@contextmanager
def own_directory(runs_directory: Path) -> Iterator[Path]:
    """A private directory with a secret; afterwards there is neither it nor one made for it."""
    made = not runs_directory.exists()
    try:
        runs_directory.mkdir(parents=True, exist_ok=True)
        own = TemporaryDirectory(prefix=".doctor-", dir=runs_directory)
    except OSError as error:
        raise LiverError(f"{error.filename} cannot be made: {error.strerror}") from error
    try:
        with own:
            create_secret(Path(own.name) / "secret")
            yield Path(own.name)
    finally:
        if made:
            with suppress(OSError):  # something else has come into it
                runs_directory.rmdir()


def _shared(nodes: Nodes) -> Result:
    token = secrets.token_hex(16)
    (nodes.directory / ASKERS_TOKEN).write_text(token, encoding="ascii")
    result = nodes.each("shared", token=token)
    if result.level is Level.PASS:
        waits_for = f"what the nodes wrote into {nodes.directory} to be seen here"
        written = [nodes.directory / name for name in nodes.names]
        deadline = Deadline.after(SystemClock(), _SEEN_S, waits_for)
        poll_until(lambda: all(path.exists() for path in written), deadline)
    return result


def _clocks(nodes: Nodes) -> Result:
    """All are asked at once: what they say is apart by no more than their clocks and the wait."""
    began_s = time.monotonic()
    answers = nodes.probes.ask(nodes.names, "now", _NODE_S)
    wait_s = time.monotonic() - began_s
    said = sorted((said["s"], name) for name, said in answers.items())
    (slow_s, slow), (fast_s, fast) = said[0], said[-1]
    found = f"{fast} is {1e3 * (fast_s - slow_s):.1f} ms before {slow}, or {1e3 * wait_s:.1f} less"
    if fast_s - slow_s - wait_s > MOST_SKEW_S:
        return warned(found, "have chrony or ntpd started; times in the metrics are compared")
    return passed(found)


def _meeting(nodes: Nodes) -> Result:
    first, second = nodes.names[:2]
    host = nodes.one(first, "rendezvous", _MEET_S)["host"]
    said = nodes.one(second, "join", _MEET_S, within_s=_MEET_S / 2)
    return passed(f"{second} met {first} ({host}) in {said['took_s']:.2f} s")


def _bandwidth(backend: str, nodes: Nodes) -> Result:
    first, second = pair = nodes.names[:2]
    opened = nodes.probes.ask(pair, "store", _BYTES_S, within_s=_BYTES_S / 2)
    lacking = [name for name in pair if backend == "nccl" and not opened[name]["cuda"]]
    if lacking == list(pair):
        return skipped(f"not applicable: no CUDA device on {first} and {second}")
    if lacking:
        return failed(f"of {first} and {second} only {lacking[0]} has no CUDA device", _LINK)
    asked = {"rank_0": first, "backend": backend, "within_s": _BYTES_S / 2}
    asked["at"] = opened[first]["at"]
    said = nodes.probes.ask(pair, "measure", _BYTES_S, **asked)[second]
    return passed(
        f"{said['megabytes_per_s']:.0f} MB/s from {first} to {second} by {said['transport']}"
    )


_LINK = "see that nodes reach each other on the interface above; name another in network"
_MOUNT = "put it on a file system that all nodes mount"

NODE_CHECKS: tuple[Check[Nodes], ...] = (
    Check("versions", lambda nodes: nodes.each("same_versions", wanted=versions())),
    Check("locked memory", lambda nodes: nodes.each("locked_memory")),
    Check("interfaces", lambda nodes: nodes.each("interfaces")),
    Check("shared directory", _shared, (), _MOUNT),
)
PAIR_CHECKS: tuple[Check[Nodes], ...] = (
    Check("clocks", _clocks),
    Check("mpi meeting", _meeting, ("interfaces", "shared directory"), _LINK),
    Check("gloo", partial(_bandwidth, "gloo"), ("interfaces",), _LINK),
    Check("nccl", partial(_bandwidth, "nccl"), ("interfaces",), _LINK),
)
