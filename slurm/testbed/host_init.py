"""The first process of a host: in a node it is pid 1, and with it the whole node ends.

Runs as a plain script (`python -I -S host_init.py PLAN`) inside new namespaces. It makes them into
a host, says `ready`, waits for a line (the network cable is plugged in meanwhile; if the one who
was to do so dies, so does this), starts the host's daemon and reaps whatever ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def private_tmp(staging: str, binds: list[str]) -> None:
    """An empty /tmp and /dev/shm; of the old /tmp only the shared directories stay."""
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", staging)
    for path in binds:
        target = os.path.join(staging, os.path.relpath(path, "/tmp"))
        os.makedirs(target)
        run("mount", "--rbind", path, target)
    run("mount", "--rbind", staging, "/tmp")


def main(plan: dict[str, Any]) -> None:
    socket.sethostname(plan["host"])
    run("mount", "--bind", plan["hosts_file"], "/etc/hosts")
    run("mount", "-t", "sysfs", "sysfs", "/sys")  # shows the interfaces of this host only
    # slurmd wants a file system here, even where it uses no cgroups; an empty one keeps it away
    # from this machine's, and from systemd.
    run("mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
    if plan["staging"]:
        private_tmp(plan["staging"], plan["binds"])
    for command in plan["before"]:
        run(*command)
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(f"{plan['host']}: nobody plugged in the network")
    for command in plan["after"]:
        run(*command)
    log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if plan["daemon"]:
        # A daemon that inherits the blocked signal would never hear of its own children.
        subprocess.Popen(
            plan["daemon"],
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD}),
        )
    while True:
        signal.sigwait({signal.SIGCHLD})
        reap()


def reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
