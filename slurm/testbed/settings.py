"""What a cluster is made of, and where it keeps its things."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import LiverError
from liver_hpc.host.files import locked_alone, write_whole

STATE_ROOT = Path("/run/slurm-testbed")
REPOSITORY = Path(__file__).parents[2]
MOST_NODES = 200
# Every process of a cluster has it in its environment, with the state directory as its value.
MARKER = "SLURM_TESTBED"

# A cluster's network lies in its own namespaces: all clusters use the same addresses and ports.
SUBNET = "10.77.0"
CONTROL_HOST = "ctl"
BRIDGE = "slurmbr0"
SLURMCTLD_PORT = 16817
SLURMD_PORT = 17000


class ClusterError(LiverError):
    """The test cluster cannot do what was asked; the text says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """One cluster. Paths in `shared` are absolute."""

    name: str = "liver"
    nodes: int = 4
    cpus: int = 4
    gpus: int = 2
    memory_mb: int = 3500
    grace_s: int = 30
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 15
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.name):
            raise ClusterError(
                f"cluster name {self.name!r}: wanted up to 31 of a-z, 0-9 and -, a letter first"
            )
        for key, least, most in (
            ("nodes", 1, MOST_NODES),
            ("cpus", 1, 1024),
            ("gpus", 0, 64),
            ("memory_mb", 64, 1 << 30),
            ("grace_s", 0, 65000),
            ("kill_wait_s", 1, 65000),
            ("slurmd_timeout_s", 3, 65000),
        ):
            if not least <= getattr(self, key) <= most:
                raise ClusterError(f"{key}: wanted {least} to {most}, got {getattr(self, key)}")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))


def node_address(node: str) -> str:
    """n1 is the eleventh address of the subnet."""
    return f"{SUBNET}.{10 + int(node[1:])}"


def binds_needed(shared: tuple[str, ...]) -> list[str]:
    """Those of `shared`, and of what every node needs, that a node's own /tmp would hide.

    Everything outside /tmp and /dev/shm is seen by all nodes anyway, as on a shared file system.
    A directory inside of another one comes with it.
    """
    own = (str(REPOSITORY), sys.prefix, sys.base_prefix)
    wanted = {Path(path).resolve() for path in (*shared, *own)}
    for path in sorted(wanted):
        if not path.is_dir():
            raise ClusterError(f"shared directory {path} does not exist")
        if path == Path("/tmp") or path.is_relative_to("/dev/shm"):
            raise ClusterError(
                f"{path} cannot be shared: a node has its own /tmp and /dev/shm; "
                "choose a directory inside /tmp or elsewhere"
            )
    hidden = {path for path in wanted if path.is_relative_to("/tmp")}
    return sorted(str(path) for path in hidden if hidden.isdisjoint(path.parents))


class Place:
    """The state directory of one cluster."""

    def __init__(self, name: str, root: Path = STATE_ROOT) -> None:
        self.name = name
        self.root = root / name
        self.settings_file = self.root / "settings.json"
        self.slurm_conf = self.root / "etc" / "slurm.conf"
        self.hosts = self.root / "etc" / "hosts"
        self.munge_key = self.root / "etc" / "munge.key"
        self.munge_socket = self.root / "run" / "munge.socket"
        self.run = self.root / "run"
        self.logs = self.root / "log"
        self.records = self.root / "processes"
        self.devices = self.root / "dev"

    def node_tmp(self, node: str) -> Path:
        """Where a node's /tmp is put together; only the node sees anything in it."""
        return self.root / "nodes" / node / "tmp"

    def make(self, settings: Settings) -> None:
        """All directories and the settings; the lock is held."""
        for path in (self.slurm_conf.parent, self.run, self.logs, self.records, self.devices):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        for node in settings.node_names:
            self.node_tmp(node).mkdir(parents=True, exist_ok=True)
            (self.root / "spool" / node).mkdir(parents=True, exist_ok=True)
        write_whole(self.settings_file, json.dumps(asdict(settings), indent=2) + "\n")

    def settings(self) -> Settings:
        """Of the cluster that is up, or half up; raises ClusterError where there is none."""
        try:
            values = json.loads(self.settings_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ClusterError(
                f"there is no cluster {self.name!r}; bring it up: "
                f"python -m slurm.testbed --name {self.name} up"
            ) from None
        return Settings(**{**values, "shared": tuple(values["shared"])})

    @contextmanager
    def locked(self, limit_s: float) -> Iterator[None]:
        """One command at a time changes a cluster, of which nothing need be there."""
        command = f"the command that is changing cluster {self.name!r} now"
        path = self.root.parent / f".{self.name}.lock"
        with lock_awaited(path, Deadline.after(SystemClock(), limit_s, command)):
            yield


@contextmanager
def lock_awaited(path: Path, deadline: Deadline) -> Iterator[None]:
    """As `locked_alone`, for who waits. Raises DeadlineError."""
    with ExitStack() as held:

        def take() -> bool:
            # Whoever had it before may have removed its directory just now.
            with suppress(BlockingIOError, FileNotFoundError):
                held.enter_context(locked_alone(path))
                return True
            return False

        poll_until(take, deadline, interval_s=0.1)
        yield
