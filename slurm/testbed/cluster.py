"""A cluster's life: up, changed while it runs, down."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError
from slurm.testbed import configuration, controller, hosts
from slurm.testbed.membership import Holder, Kept, describe, load_holder, members
from slurm.testbed.packages import install_missing
from slurm.testbed.settings import (
    CONTROL_HOST,
    MARKER,
    ClusterError,
    Place,
    Settings,
    binds_needed,
)

LOCK_LIMIT_S = 90.0
NODES_LIMIT_S = 30.0
DOWN_LIMIT_S = 30.0


def up(settings: Settings, place: Place) -> None:
    """Returns once every node takes jobs; raises ClusterError, and leaves nothing, otherwise."""
    install_missing()
    binds_needed(settings.shared)
    _outside(place)
    with place.locked(LOCK_LIMIT_S):
        if place.settings_file.exists():
            raise ClusterError(
                f"cluster {place.name!r} is up, or was never taken down: "
                f"python -m slurm.testbed --name {place.name} down"
            )
        with ExitStack() as stack:
            stack.callback(_remove, place)
            place.make(settings)
            configuration.write_all(settings, place)
            hosts.start_control(place)
            controller.start_munge(place)
            controller.start_slurmctld(place)
            began_s = time.time()
            hosts.start_nodes(place, settings, settings.node_names)
            controller.wait_for_nodes(place, settings.node_names, began_s, NODES_LIMIT_S)
            stack.pop_all()  # it stands, and is not removed


def down(place: Place) -> None:
    """Removes all that belongs to the cluster, however it came about; raises ClusterError naming
    what stays."""
    _outside(place)
    if not place.root.exists() and not members(place, set()):
        return
    with place.locked(LOCK_LIMIT_S):
        _remove(place)
    with suppress(OSError):  # there are others
        place.root.parent.rmdir()


def _outside(place: Place) -> None:
    if os.environ.get(MARKER) == str(place.root):
        raise ClusterError(f"this is a shell of cluster {place.name!r}; leave it first")


def _remove(place: Place) -> None:
    control = load_holder(place, CONTROL_HOST)
    spared = {control.pid} if control else set()
    with Kept() as kept:
        kept.keep_recorded(place)
        # The control host's holder goes last: should this be killed too, the next `down` still
        # finds its namespaces and all in them.
        _kill_all(place, kept.names, spared)
        _kill_all(place, kept.names, set())
    if mounts := mounts_inside(place):
        raise ClusterError(f"still mounted: {', '.join(mounts)}")
    with suppress(FileNotFoundError):
        shutil.rmtree(place.root)


def _kill_all(place: Place, held: set[str], spared: set[int]) -> None:
    def none_left() -> bool:
        alive = set(members(place, held)) - spared
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not alive

    try:
        poll_until(none_left, Deadline.after(SystemClock(), DOWN_LIMIT_S, "its processes"), 0.05)
    except DeadlineError:
        left = ", ".join(describe(pid) for pid in set(members(place, held)) - spared)
        raise ClusterError(f"waited {DOWN_LIMIT_S:g} s for the end of {left}") from None


def mounts_inside(place: Place) -> list[str]:
    """Mount points under the state directory that this process sees; a cluster never makes any."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if Path(point).is_relative_to(place.root)]


def kill_node(place: Place, node: str) -> None:
    """The machine is lost at once: no signal is heard there, no connection closed."""
    _check_node(place.settings(), node)
    with place.locked(LOCK_LIMIT_S):
        hosts.lose(place, node)


def start_node(place: Place, node: str) -> None:
    """Returns once the node takes jobs again."""
    settings = place.settings()
    _check_node(settings, node)
    with place.locked(LOCK_LIMIT_S):
        if load_holder(place, node) is not None:
            raise ClusterError(f"{node} of cluster {place.name!r} is up")
        began_s = time.time()
        hosts.start_nodes(place, settings, [node])
        controller.wait_for_nodes(place, (node,), began_s, NODES_LIMIT_S)


def kill_controller(place: Place) -> None:
    """slurmctld is lost at once; nodes, jobs and steps go on."""
    place.settings()
    with place.locked(LOCK_LIMIT_S):
        controller.kill_slurmctld(place)


def start_controller(place: Place) -> None:
    """Returns once slurmctld answers again, with the jobs that it knew."""
    place.settings()
    with place.locked(LOCK_LIMIT_S):
        if controller.slurmctld_pid(place) is not None:
            raise ClusterError(f"slurmctld of cluster {place.name!r} is up")
        controller.start_slurmctld(place, again=True)


def _check_node(settings: Settings, node: str) -> None:
    if node not in settings.node_names:
        raise ClusterError(f"no node {node!r}; there are {', '.join(settings.node_names)}")


def limit(place: Place, node: str, rate: str, down: bool = False) -> None:
    """Bounds a node's link, each direction by itself; an empty rate takes the bound away.

    rate: as tc has it, such as 100mbit. down: nothing passes at all, as where a cable is out.
    """
    _check_node(place.settings(), node)
    with place.locked(LOCK_LIMIT_S):
        ends = ((CONTROL_HOST, hosts.cable_of(node)), (node, "eth0"))
        for host, device in ends:
            _limit_device(hosts.holder_of(place, host), device, rate)
        control = hosts.in_network_of(hosts.holder_of(place, CONTROL_HOST))
        hosts.call(*control, "ip", "link", "set", hosts.cable_of(node), "down" if down else "up")


def _limit_device(holder: Holder, device: str, rate: str) -> None:
    tc = hosts.in_network_of(holder, "tc", "qdisc")
    hosts.call(*tc, "del", "dev", device, "root", may_fail=True)
    if rate:
        shape = ("rate", rate, "burst", str(burst_bytes(rate)), "latency", "100ms")
        hosts.call(*tc, "add", "dev", device, "root", "handle", "10:", "tbf", *shape)


def burst_bytes(rate: str) -> int:
    """What may pass at once: 10 ms of the rate, and never less than the largest segment."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise ClusterError(f"rate {rate!r}: wanted a whole number and kbit, mbit or gbit")
    bits_per_s = int(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2]]
    return max(1 << 16, bits_per_s // 8 // 100)


def status(place: Place) -> str:
    """What is up, and what Slurm says of nodes and jobs."""
    settings = place.settings()
    lines = [f"cluster {place.name} in {place.root}; SLURM_CONF={place.slurm_conf}"]
    for host in (CONTROL_HOST, *settings.node_names):
        holder = load_holder(place, host)
        lines.append(f"  {host:<5} {f'up, process {holder.pid}' if holder else 'down'}")
    lines.append(controller.ask(place, "sinfo", "--Node", "--format", "%N %P %T %c %G").rstrip())
    lines.append(controller.ask(place, "squeue").rstrip())
    return "\n".join(lines)
