"""Slurm as its clients see it, asked from the control host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError
from slurm.testbed.hosts import environment, in_control
from slurm.testbed.membership import is_marked, started_ticks
from slurm.testbed.packages import finished, program
from slurm.testbed.settings import ClusterError, Place

ASK_LIMIT_S = 15.0
START_LIMIT_S = 30.0
KILL_LIMIT_S = 10.0
_NOT_FIT = r"\*|DOWN|DRAIN|FAIL|UNKNOWN|NOT_RESPONDING"


def start_munge(place: Place) -> None:
    """On the control host; returns once it answers."""
    munged = [program("munged"), "-F", "-f", "--socket", str(place.munge_socket)]
    munged += ["--key-file", str(place.munge_key), "--log-file", str(place.logs / "munged.log")]
    munged += ["--pid-file", str(place.run / "munged.pid")]
    munged += ["--seed-file", str(place.run / "munged.seed")]
    start_daemon(place, "munged", munged, place.munge_socket.is_socket)


def start_slurmctld(place: Place, again: bool = False) -> None:
    """On the control host, where munge runs; returns once it answers. `again`: it knows the jobs
    and nodes of the one before it."""
    slurmctld = [program("slurmctld"), "-D", *(() if again else ("-c", "-i"))]
    start_daemon(place, "slurmctld", slurmctld, lambda: _answers(place))


def slurmctld_pid(place: Place) -> int | None:
    """None where none runs."""
    try:
        pid = int(_slurmctld_pid_file(place).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return pid if is_marked(pid, place) and started_ticks(pid) is not None else None


def kill_slurmctld(place: Place) -> None:
    """At once, as when its machine is lost; raises ClusterError where none runs."""
    pid = slurmctld_pid(place)
    if pid is None:
        raise ClusterError(f"slurmctld of cluster {place.name!r} is down")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = Deadline.after(SystemClock(), KILL_LIMIT_S, f"the end of slurmctld, process {pid}")
    poll_until(lambda: started_ticks(pid) is None, deadline, interval_s=0.05)
    _slurmctld_pid_file(place).unlink(missing_ok=True)


def _slurmctld_pid_file(place: Place) -> Path:
    return place.run / "slurmctld.pid"


def start_daemon(place: Place, name: str, command: list[str], answers: Callable[[], bool]) -> None:
    """Starts it on the control host; returns once it answers, raises ClusterError if it ends."""
    log = place.logs / f"{name}.out"
    with log.open("ab") as output:
        process = subprocess.Popen(
            in_control(place, command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(place),
            start_new_session=True,
        )

    def stands() -> bool:
        if process.poll() is not None:
            last_words = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise ClusterError(f"{name} ended with status {process.returncode}:\n{last_words}")
        return answers()

    poll_until(stands, Deadline.after(SystemClock(), START_LIMIT_S, name), interval_s=0.05)


def _answers(place: Place) -> bool:
    return "is UP" in ask(place, "scontrol", "ping")


def ask(place: Place, *command: str) -> str:
    """What a Slurm client prints; an empty text where it failed, as while slurmctld starts."""
    done = finished(in_control(place, command), ASK_LIMIT_S, environment(place))
    return done.stdout if done.returncode == 0 else ""


def _unfit(place: Place, since_s: float) -> dict[str, str]:
    """The state of each node that slurmctld knows; an empty one where a slurmd that was started
    after `since_s` (epoch seconds) has registered, and jobs may go there."""
    found = {}
    for line in ask(place, "scontrol", "--oneliner", "show", "nodes").splitlines():
        values = dict(re.findall(r"(NodeName|State|SlurmdStartTime)=(\S+)", line))
        started_s, state = 0.0, values["State"]
        with suppress(ValueError):  # None or Unknown: it never registered
            started_s = datetime.fromisoformat(values.get("SlurmdStartTime", "")).timestamp()
        if started_s >= int(since_s) and not re.search(_NOT_FIT, state):
            state = ""
        found[values["NodeName"]] = state
    return found


def wait_for_nodes(place: Place, nodes: tuple[str, ...], since_s: float, limit_s: float) -> None:
    """Until slurmctld takes jobs for all of `nodes`; the error names those that are not there."""
    missing: dict[str, str] = {}

    def all_serve() -> bool:
        states = _unfit(place, since_s)
        missing.clear()
        missing.update({node: states.get(node, "unknown to slurmctld") for node in nodes})
        return not any(missing.values())

    deadline = Deadline.after(SystemClock(), limit_s, f"slurmd of {', '.join(nodes)}")
    try:
        poll_until(all_serve, deadline, interval_s=0.1)
    except DeadlineError:
        late = {node: state for node, state in missing.items() if state}
        states = ", ".join(f"{node} ({state})" for node, state in late.items())
        raise ClusterError(
            f"waited {limit_s:g} s for slurmd of {states}\n{log_end(place, *late)}"
        ) from None


def log_end(place: Place, *nodes: str) -> str:
    """The last lines of some nodes' logs and of slurmctld's, for an error's text."""
    paths = [place.logs / f"slurmd.{node}.log" for node in nodes[:2]]
    paths += [place.logs / f"{node}.out" for node in nodes[:2]] + [place.logs / "slurmctld.log"]
    ends = []
    for path in paths:
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
            ends.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(ends)
