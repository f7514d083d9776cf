"""`python -m benchmarks.soak.coordinator RUN`: the coordinator of a run on nodes that the benchmark
gives and takes. The benchmark starts another one where it has killed one."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from liver_hpc.cluster.pool import NodePool
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.main import run_coordinator, services_of
from liver_hpc.coordinator.performer import Services
from liver_hpc.run.epoch import Superseded
from liver_hpc.run.events import Node, NodeGone, NodeGranted, NodeWarned, PoolEvent

_POLL_S = 0.05


class NodeBook:
    """What the benchmark says of nodes, and which ones the run has given back: two files of lines,
    each appended to by one process at a time."""

    def __init__(self, run_directory: Path) -> None:
        self._told, self._returned = run_directory / "nodes", run_directory / "returned"
        self._heard = self._seen = 0

    # ---- the benchmark's side

    def grant(self, node: str) -> None:
        self._say(["granted", node])

    def warn(self, node: str, at_s: float, deadline_s: float) -> None:
        self._say(["warned", node, at_s, deadline_s])

    def take(self, node: str) -> None:
        self._say(["gone", node])

    def _say(self, words: list[Any]) -> None:
        _append(self._told, json.dumps(words))

    def given_back(self) -> list[str]:
        """Since the last call."""
        lines, self._seen = _lines_after(self._returned, self._seen)
        return lines

    # ---- the coordinator's side

    def news(self) -> list[PoolEvent]:
        """Since the last call."""
        lines, self._heard = _lines_after(self._told, self._heard)
        return [_event(*json.loads(line)) for line in lines]

    def give_back(self, node: str) -> None:
        _append(self._returned, node)


def _event(kind: str, node: str, *times: float) -> PoolEvent:
    if kind == "granted":
        return NodeGranted(Node(node, "soak", slots=1, preemptible=True))
    if kind == "warned":
        return NodeWarned(node, "preempted", *times)
    return NodeGone(node, "its time was up")


def _name(event: PoolEvent) -> str:
    assert isinstance(event, NodeGranted | NodeWarned | NodeGone)
    return event.node.name if isinstance(event, NodeGranted) else event.node


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _lines_after(path: Path, offset: int) -> tuple[list[str], int]:
    """Whole lines from `offset` on, and where the next ones begin."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        whole, end, _ = file.read().rpartition(b"\n")
        return whole.decode().splitlines(), offset + len(whole) + len(end)
    return [], offset


class BookedNodes(NodePool):
    """The nodes of a book. Every coordinator of a run hears how each of them stands."""

    def __init__(self, run_directory: Path) -> None:
        self._book = NodeBook(run_directory)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, tell: Callable[[PoolEvent], None], adopt: Collection[str] | None = None
    ) -> None:
        last: dict[str, PoolEvent] = {}
        for event in self._book.news():
            last[_name(event)] = event
        for name, event in last.items():
            if isinstance(event, NodeWarned) and adopt is None:
                tell(_event("granted", name))
            if adopt is not None or not isinstance(event, NodeGone):
                tell(event)
        self._thread = threading.Thread(target=self._hear, args=(tell,), daemon=True)
        self._thread.start()

    def _hear(self, tell: Callable[[PoolEvent], None]) -> None:
        while not self._ending.wait(_POLL_S):
            for event in self._book.news():
                tell(event)

    def give_back(self, node: str) -> None:
        self._book.give_back(node)

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()


def main() -> int:
    run_directory = Path(sys.argv[1])

    def build(*arguments: Any) -> Services:
        return replace(services_of(*arguments), pool=BookedNodes(run_directory))

    with suppress(Superseded):
        run_coordinator(run_directory, Control(), build)
    return 0


if __name__ == "__main__":
    sys.exit(main())
