"""The programs that a cluster is made of, and how they get onto Debian or Ubuntu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from slurm.testbed.settings import ClusterError, lock_awaited

# Which package brings which program.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
INSTALL_LIMIT_S = 300.0
INSTALL_LOCK = Path("/run/slurm-testbed-install.lock")
# Slurm's daemons are in sbin, which is not on everybody's path.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def program(name: str) -> str:
    """The full path of a system program."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise ClusterError(
            f"{name} is not on this machine: apt-get install {PROGRAMS.get(name, name)}"
        )
    return found


def missing_packages(further: Mapping[str, str] = {}) -> list[str]:
    """further: programs that are wanted beside those of every cluster, as of all functions here."""
    wanted = {**PROGRAMS, **further}
    missing = {
        package for name, package in wanted.items() if not shutil.which(name, path=SYSTEM_PATH)
    }
    return sorted(missing)


def why_not(further: Mapping[str, str] = {}) -> str:
    """Why this machine can hold no cluster, or an empty text."""
    if not sys.platform.startswith("linux"):
        return f"a test cluster needs Linux's namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "a test cluster needs root (namespaces, munge, several slurmd); run it as root"
    missing = missing_packages(further)
    if missing and not shutil.which("apt-get"):
        return (
            f"missing here: {', '.join(missing)}; there is no apt-get to install them with: "
            "install Slurm and munge by your distribution's means"
        )
    probe = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true")
    if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode != 0:
        return "namespaces may not be made here (a container without CAP_SYS_ADMIN?)"
    return ""


def install_missing(further: Mapping[str, str] = {}) -> None:
    """Installs what is missing; raises ClusterError with apt's last words."""
    reason = why_not(further)
    if reason:
        raise ClusterError(reason)
    if not missing_packages(further):
        return
    # Not all of apt's own locks are waited for by it.
    deadline = Deadline.after(SystemClock(), 2 * INSTALL_LIMIT_S, "another installation to end")
    with lock_awaited(INSTALL_LOCK, deadline):
        _install(further)


def _install(further: Mapping[str, str]) -> None:
    missing = missing_packages(further)
    if not missing:
        return  # somebody else was faster
    print(f"installing {', '.join(missing)}", file=sys.stderr, flush=True)
    words = _apt("install", *missing)
    if missing_packages(further):
        _apt("update")
        words = _apt("install", *missing)
    if left := missing_packages(further):
        raise ClusterError(f"apt-get could not install {', '.join(left)}:\n{words}")


def _apt(*arguments: str) -> str:
    """The end of what apt-get said; whether it did its work shows in what is there afterwards."""
    command = ("apt-get", "-y", "-qq", "-o", "DPkg::Lock::Timeout=120", "--no-install-recommends")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = finished((*command, *arguments), INSTALL_LIMIT_S, environment)
    return "\n".join((done.stdout + done.stderr).splitlines()[-8:])


def finished(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What has come of a command. Raises ClusterError where it does not end in time."""
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"waited {limit_s:g} s for {' '.join(command)}") from None
