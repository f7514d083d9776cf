"""The hosts of a cluster: made, entered, lost."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from slurm.testbed.membership import Holder, Kept, children, inhabitants, load_holder
from slurm.testbed.packages import SYSTEM_PATH, finished, program
from slurm.testbed.settings import (
    BRIDGE,
    CONTROL_HOST,
    MARKER,
    SUBNET,
    ClusterError,
    Place,
    Settings,
    binds_needed,
    node_address,
)

HOST_LIMIT_S = 20.0
COMMAND_LIMIT_S = 10.0
HOST_INIT = Path(__file__).with_name("host_init.py")


def environment(place: Place) -> dict[str, str]:
    """What every process of the cluster is started with: its mark, and where Slurm's file is."""
    return {
        **os.environ,
        "PATH": os.environ.get("PATH", "") + ":" + SYSTEM_PATH,
        MARKER: str(place.root),
        "SLURM_CONF": str(place.slurm_conf),
    }


def call(*command: str, may_fail: bool = False) -> str:
    """Output of a short system command; raises ClusterError with its complaint."""
    done = finished((program(command[0]), *command[1:]), COMMAND_LIMIT_S)
    if done.returncode != 0 and not may_fail:
        raise ClusterError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def holder_of(place: Place, host: str) -> Holder:
    """Of a host that is up; raises ClusterError otherwise."""
    holder = load_holder(place, host)
    if holder is None:
        raise ClusterError(f"{host} of cluster {place.name!r} is down")
    return holder


def in_network_of(holder: Holder, *command: str) -> tuple[str, ...]:
    """The command as it runs in a host's network, seeing this machine's files."""
    return ("nsenter", "--target", str(holder.pid), "--net", "--", *command)


def in_control(place: Place, command: Sequence[str]) -> list[str]:
    """The command as it runs on the control host, in the present directory."""
    holder = holder_of(place, CONTROL_HOST)
    enter = [program("nsenter"), "--target", str(holder.pid)]
    enter += ["--net", "--uts", "--ipc", "--mount", "--"]
    # Entering a mount namespace loses the present directory.
    return [*enter, "/bin/sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]


class Starting:
    """A host on its way: `ready()` once its namespaces stand, then `go()`."""

    def __init__(self, place: Place, host: str, plan: dict[str, object]) -> None:
        self._place = place
        self._host = host
        self._node = bool(plan["staging"])
        pid_flags = ["--pid", "--fork", "--kill-child", "--mount-proc"] if self._node else []
        command = [program("unshare"), "--net", "--uts", "--ipc", "--mount", *pid_flags, "--"]
        self._log = place.logs / f"{host}.out"
        plan = {**plan, "host": host, "hosts_file": str(place.hosts), "log": str(self._log)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-I", "-S", str(HOST_INIT), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(place),
                start_new_session=True,
            )

    def ready(self, deadline: Deadline) -> Holder:
        """Its holder, recorded; raises ClusterError with what the host complained about."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], deadline.remaining_s())
        if not readable:
            raise deadline.error()
        if (said := self._process.stdout.readline()) != b"ready\n":
            complaint = self._log.read_text(encoding="utf-8", errors="replace")[-1000:]
            with suppress(subprocess.TimeoutExpired):
                complaint += f"exit code {self._process.wait(deadline.remaining_s())}"
            raise ClusterError(f"{self._host} could not be made: it said {said!r}\n{complaint}")
        pid = self._process.pid
        if self._node:
            pid = next(iter(children(pid)), 0)
        holder = Holder.of(self._host, pid)
        holder.save(self._place)
        return holder

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()


def start_control(place: Place) -> None:
    """The control host: the bridge between all nodes, slurmctld, munge, and who uses them."""
    before = [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "link", "add", BRIDGE, "type", "bridge"),
        ("ip", "addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE),
        ("ip", "link", "set", BRIDGE, "up"),
    ]
    plan: dict[str, object] = {
        "staging": "",
        "binds": [],
        "before": before,
        "after": [],
        "daemon": [],
    }
    starting = Starting(place, CONTROL_HOST, plan)
    starting.ready(Deadline.after(SystemClock(), HOST_LIMIT_S, "the control host"))
    starting.go()


def start_nodes(place: Place, settings: Settings, nodes: Sequence[str]) -> None:
    """Returns once the nodes are on the network; their slurmd is then about to start."""
    control = holder_of(place, CONTROL_HOST)
    binds = binds_needed((*settings.shared, str(place.root)))
    starting: dict[str, Starting] = {}
    for node in nodes:
        plan: dict[str, object] = {
            "staging": str(place.node_tmp(node)),
            "binds": binds,
            "before": [("ip", "link", "set", "lo", "up")],
            "after": [
                ("ip", "addr", "add", f"{node_address(node)}/24", "dev", "eth0"),
                ("ip", "link", "set", "eth0", "up"),
            ],
            "daemon": [program("slurmd"), "-D", "-N", node],
        }
        starting[node] = Starting(place, node, plan)
    deadline = Deadline.after(SystemClock(), HOST_LIMIT_S, f"the namespaces of {', '.join(nodes)}")
    for node, start in starting.items():
        holder = start.ready(deadline)
        cable, peer = cable_of(node), f"/proc/{holder.pid}/ns/net"
        # A lost node's cable goes with its network, a little after its processes.
        call(*in_network_of(control, "ip", "link", "del", cable), may_fail=True)
        add = ("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", peer)
        call(*in_network_of(control, *add))
        call(*in_network_of(control, "ip", "link", "set", cable, "master", BRIDGE, "up"))
        start.go()


def cable_of(node: str) -> str:
    """The control host's end of a node's cable."""
    return f"veth-{node}"


def lose(place: Place, node: str) -> None:
    """The node's power is cut: nobody hears a farewell from it, not even a closed connection."""
    holder = holder_of(place, node)
    control = holder_of(place, CONTROL_HOST)
    call(*in_network_of(control, "ip", "link", "set", cable_of(node), "down"))
    with Kept() as kept:
        kept.keep(holder.pid)
        holder.kill()
        deadline = Deadline.after(SystemClock(), HOST_LIMIT_S, f"the processes of {node} to end")
        poll_until(lambda: not inhabitants(kept.names), deadline)
    call(*in_network_of(control, "ip", "link", "del", cable_of(node)), may_fail=True)
    (place.records / f"{node}.json").unlink()
