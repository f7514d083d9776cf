"""The command line: `python -m slurm.testbed up --nodes 4`, `... --help`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from liver_hpc.errors import LiverError
from slurm.testbed import cluster, packages
from slurm.testbed.hosts import environment, in_control
from slurm.testbed.settings import STATE_ROOT, Place, Settings


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m slurm.testbed", description=__doc__)
    top.add_argument("--name", default=Settings.name, help="one of several clusters (%(default)s)")
    top.add_argument("--state-root", type=Path, default=STATE_ROOT, help=argparse.SUPPRESS)
    commands = top.add_subparsers(dest="command", required=True)

    up = commands.add_parser("up", help="bring a cluster up; installs what is missing")
    for option, text in (
        ("nodes", "how many nodes, n1, n2, ..."),
        ("cpus", "CPUs that each node claims to have"),
        ("gpus", "fake GPUs of each node"),
        ("memory-mb", "memory that each node claims to have"),
        ("grace-s", "GraceTime of the partition preempt"),
        ("kill-wait-s", "KillWait: between the SIGTERM and the SIGKILL of what is cancelled"),
        ("slurmd-timeout-s", "SlurmdTimeout: how soon a lost node is noticed"),
    ):
        default = getattr(Settings, option.replace("-", "_"))
        up.add_argument(f"--{option}", type=int, default=default, help=f"{text} (%(default)s)")
    up.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="DIRECTORY",
        help="a directory inside /tmp that all nodes see; any number of times",
    )

    commands.add_parser("down", help="remove it, whatever state it is in")
    commands.add_parser("status", help="nodes and jobs")
    commands.add_parser("shell", help="a shell on the control host, where Slurm's commands work")
    execute = commands.add_parser("exec", help="one command on the control host")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    for name, text in (
        ("kill-node", "lose a node at once, as if its power was cut"),
        ("start-node", "bring a lost node back"),
    ):
        commands.add_parser(name, help=text).add_argument("node")
    commands.add_parser("kill-controller", help="lose slurmctld at once; jobs and steps go on")
    commands.add_parser("start-controller", help="bring slurmctld back, with the jobs that it knew")
    limit = commands.add_parser("limit", help="bound a node's link; without options: unbound")
    limit.add_argument("node")
    limit.add_argument("--rate", default="", help="such as 100mbit, in each direction")
    limit.add_argument("--down", action="store_true", help="nothing passes; nobody hears of it")
    return top


def become(place: Place, words: list[str]) -> None:
    """This process becomes a command on the control host."""
    place.settings()
    command = in_control(place, words)
    os.execve(command[0], command, environment(place))


def perform(arguments: argparse.Namespace) -> None:
    place = Place(arguments.name, arguments.state_root.resolve())
    match arguments.command:
        case "up":
            names = [each.name for each in fields(Settings) if each.name != "shared"]
            shared = tuple(str(Path(path).resolve()) for path in arguments.share)
            told = {name: getattr(arguments, name) for name in names}
            cluster.up(Settings(**told, shared=shared), place)
            print(cluster.status(place))
        case "down":
            cluster.down(place)
        case "status":
            print(cluster.status(place))
        case "shell":
            become(place, [os.environ.get("SHELL", "/bin/sh")])
        case "exec":
            words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
            become(place, words or ["true"])
        case "kill-node":
            cluster.kill_node(place, arguments.node)
        case "start-node":
            cluster.start_node(place, arguments.node)
        case "kill-controller":
            cluster.kill_controller(place)
        case "start-controller":
            cluster.start_controller(place)
        case "limit":
            cluster.limit(place, arguments.node, arguments.rate, arguments.down)


def main() -> int:
    arguments = parser().parse_args()
    if os.geteuid() != 0:
        print(f"slurm.testbed: error: {packages.why_not()}", file=sys.stderr)
        return 2
    try:
        perform(arguments)
    except LiverError as error:
        print(f"slurm.testbed: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
