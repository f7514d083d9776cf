"""The worker processes of one layout: started together, heard, told, and ended."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.baseline.lines import (
    HOST,
    Entered,
    Go,
    Held,
    Imported,
    Line,
    Meet,
    News,
    Orders,
    Ready,
    Stepped,
    Writer,
    Written,
    read_from_worker,
)
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command, end_all, new_mark
from liver_hpc.layout.coordinates import Layout

Found = TypeVar("Found", bound=Line)
_KILL_S = 10.0


@dataclass(frozen=True)
class Node:
    """Where workers run: an address of the node's, and what goes before a command to run it there;
    this machine unless said."""

    host: str = HOST
    enter: tuple[str, ...] = ()


HERE = (Node(),)


@dataclass(frozen=True)
class Surroundings:
    """What a job's workers find: on `nodes` each is on the next one in turn; storage_bytes_per_s
    is what the storage carries, of all together, None: as fast as it is."""

    nodes: tuple[Node, ...] = HERE
    storage_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Start:
    """What a set of workers is started for; without `directory` its state begins from the seed.
    held: they import, and wait for `go`."""

    run_directory: Path
    layout: Layout
    generation: int
    directory: Path | None = None
    digests: bool = False
    held: bool = False
    around: Surroundings = Surroundings()

    def node_of(self, rank: int) -> Node:
        return self.around.nodes[rank % len(self.around.nodes)]


class Workers:
    """The processes of one layout on this machine, in the calling process's care: they end with
    it. `heard` is called for every step, in a thread of its own."""

    def __init__(self, start: Start, heard: Callable[[Stepped], None]) -> None:
        self.start = start
        self._heard = heard
        self._news = threading.Condition()
        self._lines: dict[int, list[News]] = {}
        self._ended: set[int] = set()
        self._mark = new_mark()
        self._children: list[Child] = []
        self._writers: list[Writer] = []
        self._readers: list[threading.Thread] = []
        self._log = start.run_directory / "logs" / f"restart-{start.generation}.log"
        try:
            for rank in range(start.layout.workers):
                self._spawn(rank)
        except LiverError:
            self.kill()
            raise

    def _spawn(self, rank: int) -> None:
        theirs_read, ours_write = os.pipe()
        ours_read, theirs_write = os.pipe()
        self._writers.append(Writer(ours_write))
        self._lines[rank] = []
        command = Command(
            f"worker {rank} of {self.start.layout}",
            self._command(rank, theirs_read, theirs_write),
            log=self._log,
            pass_fds=(theirs_read, theirs_write),
            mark=self._mark,
        )
        try:
            self._children.append(Child(command))
        except LiverError:
            os.close(ours_read)
            raise
        finally:
            os.close(theirs_read)
            os.close(theirs_write)
        reader = threading.Thread(
            target=self._listen, args=(rank, ours_read), name=f"rank-{rank}", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def _command(self, rank: int, read_fd: int, write_fd: int) -> list[str]:
        start, node = self.start, self.start.node_of(rank)
        orders = Orders(
            run_directory=start.run_directory,
            layout=str(start.layout),
            rank=rank,
            generation=start.generation,
            load_directory=start.directory,
            digests=start.digests,
            host=node.host,
            held=start.held,
            storage_bytes_per_s=start.around.storage_bytes_per_s,
        )
        command = [*node.enter, sys.executable, "-m", "benchmarks.baseline.worker"]
        return [*command, orders.model_dump_json(), str(read_fd), str(write_fd)]

    def _listen(self, rank: int, descriptor: int) -> None:
        def handle(line: News) -> None:
            if isinstance(line, Stepped):
                self._heard(line)
            with self._news:
                self._lines[rank].append(line)
                self._news.notify_all()

        read_from_worker(descriptor, handle)
        with self._news:
            # One that has saved ends at once, also while others still write.
            if not any(isinstance(line, Written) for line in self._lines[rank]):
                self._ended.add(rank)
            self._news.notify_all()

    # ---- waiting

    def meet(self, limit_s: float) -> None:
        """Tells all where worker 0 keeps the store, once it is open."""
        imported = self._first(Imported, (0,), limit_s)[0]
        self.tell(Meet(host=self.start.node_of(0).host, port=imported.port))

    def held(self, limit_s: float) -> None:
        """Returns once all have imported, and wait."""
        self._first(Held, self._ranks, limit_s)

    def go(self) -> None:
        """Lets those go that are held."""
        self.tell(Go())

    def entered_s(self, limit_s: float) -> float:
        """When the last worker's interpreter ran."""
        return max(line.at_s for line in self._first(Entered, self._ranks, limit_s))

    def imported_s(self, limit_s: float) -> float:
        """When the last worker had imported everything."""
        return max(line.at_s for line in self._first(Imported, self._ranks, limit_s))

    def ready(self, limit_s: float) -> list[Ready]:
        """By rank, once all stand with their state."""
        return self._first(Ready, self._ranks, limit_s)

    def written(self, limit_s: float) -> list[Written]:
        """By rank, once all have saved."""
        return self._first(Written, self._ranks, limit_s)

    def steps(self, count: int, limit_s: float) -> list[Stepped]:
        """The first `count` steps, once they are done."""

        def done() -> list[Stepped] | None:
            found = [line for line in self._lines[0] if isinstance(line, Stepped)]
            return found[:count] if len(found) >= count else None

        return self._await(done, limit_s, f"{count} steps")

    @property
    def steps_done(self) -> int:
        """Steps that these workers have done so far."""
        with self._news:
            return sum(isinstance(line, Stepped) for line in self._lines[0])

    @property
    def _ranks(self) -> range:
        return range(self.start.layout.workers)

    def _first(self, kind: type[Found], ranks: Sequence[int], limit_s: float) -> list[Found]:
        """The first line of a kind of each of `ranks`."""

        def come() -> list[Found] | None:
            found: list[Found] = []
            for rank in ranks:
                found += [line for line in self._lines[rank] if isinstance(line, kind)][:1]
            return found if len(found) == len(ranks) else None

        return self._await(come, limit_s, kind.__name__)

    def _await(
        self, come: Callable[[], list[Found] | None], limit_s: float, what: str
    ) -> list[Found]:
        found: list[Found] | None = None

        def settled() -> bool:
            nonlocal found
            found = come()
            return found is not None or bool(self._ended)

        with self._news:
            in_time = self._news.wait_for(settled, limit_s)
        if found is not None:
            return found
        where = f"{self.start.layout}, generation {self.start.generation}"
        if in_time:
            raise LiverError(
                f"workers {sorted(self._ended)} of {where} ended before {what}; see {self._log}"
            )
        raise DeadlineError(f"waited {limit_s:g} s for {what} of {where}; see {self._log}")

    # ---- telling and ending

    def tell(self, line: Line) -> None:
        """All workers; one that has ended hears nothing."""
        for writer in self._writers:
            try:
                writer.send(line)
            except BrokenPipeError:
                continue

    def join(self, limit_s: float) -> None:
        """Waits for the end of all; raises LiverError when one of them failed."""
        for child in self._children:
            if child.wait(limit_s) != 0:
                raise LiverError(f"{child.name} ended with {child.how()}; see {self._log}")
        self._close()

    def kill(self) -> None:
        """Ends whatever still runs. Idempotent."""
        end_all(self._children, 0.0)
        self._close()

    def _close(self) -> None:
        for reader in self._readers:
            reader.join(_KILL_S)
        for writer in self._writers:
            writer.close()
