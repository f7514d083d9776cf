"""`make slurm-demo`: a run on a real Slurm whose nodes come and go, and what each event cost.

Brings up a test cluster of its own, submits a run, plays the other users of the cluster, prints
what the run recorded, and removes everything. Needs root on Debian or Ubuntu.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import LiverError

REPOSITORY = Path(__file__).parents[1]
CONFIG = Path("configs/slurm-demo.yaml")
ALL_NODES = 5
GRACE_S = 30
COMMAND_S = 120.0
POLL_S = 0.5
# From the moment that nodes are there: joiners boot, all of them on this machine's few cores.
EVENT_S = 240.0


class DemoError(LiverError):
    """The run did not do what the demo shows."""


class Demo:
    """One test cluster, one run, and the other users."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._run = ""

    # ---- the cluster

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """A cluster for as long as it is needed; whatever happens it is removed."""
        self._testbed("up", "--nodes", str(ALL_NODES), "--grace-s", str(GRACE_S), "--gpus", "0")
        try:
            yield
        finally:
            self._testbed("down")
            say("the cluster is gone, and with it every process, mount and link of it")

    def _testbed(self, *words: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "slurm.testbed", "--name", self._name, *words]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        if check and done.returncode != 0:
            raise DemoError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def _on_login_node(self, *words: str, check: bool = True) -> str:
        return self._testbed("exec", "--", *words, check=check)

    def _liver(self, *words: str, check: bool = True) -> str:
        return self._on_login_node(sys.executable, "-P", "-m", "liver_hpc", *words, check=check)

    # ---- the other users

    def other_job(self) -> str:
        """Somebody else's job on the stable partition: it preempts what stands in its way."""
        return self._on_login_node(
            *("sbatch", "--parsable", "--job-name=somebody-else", "--partition=stable"),
            *("--nodelist=n4,n5", "--time=20", "--output=/dev/null", "--wrap=sleep 1200"),
        )

    def end(self, job: str) -> None:
        self._on_login_node("scancel", job)

    # ---- the run

    def submit(self) -> None:
        submit = [sys.executable, "-P", "-m", "liver_hpc.submit", "--no-follow"]
        self._run = self._on_login_node(*submit, "--config", str(CONFIG)).splitlines()[-1]
        say(f"submitted: {self._run}")

    def status(self) -> dict[str, Any]:
        """The snapshot of the run; empty while there is none, as in the queue."""
        text = self._liver("status", self._run, "--json", check=False)
        snapshot: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
        return snapshot if "workers" in snapshot else {}

    def wait_for(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Until the run's status shows it; raises DemoError when the run has ended instead."""
        last: dict[str, Any] = {}

        def shown() -> bool:
            last.update(self.status())
            outcome = REPOSITORY / self._run / "outcome.json"
            if outcome.exists():
                raise DemoError(f"waiting for {what}: the run ended: {outcome.read_text()}")
            return bool(last) and condition(last)

        poll_until(shown, Deadline.after(SystemClock(), EVENT_S, what), POLL_S)
        say(f"{what}: step {last['step']}, {last['layout']}, loss {last['loss']:.3f}")

    def workers(self, number: int, what: str) -> None:
        """Until that many workers train, undisturbed, and have done a few steps."""
        since: list[int] = []

        def steady(status: dict[str, Any]) -> bool:
            settled = len(status["workers"]) == number and status["handoff"] is None
            if not settled or status["loss"] is None:
                since.clear()
                return False
            since.append(status["step"])
            return bool(status["step"] >= since[0] + 8)

        self.wait_for(what, steady)

    def resize(self, workers: int) -> None:
        say(self._liver("resize", self._run, "--workers", str(workers)))

    def stop(self) -> None:
        say(self._liver("stop", self._run))

    def report(self) -> dict[str, Any]:
        """Prints the run's tables; returns all of its figures."""
        say(self._liver("report", self._run))
        figures: dict[str, Any] = json.loads(self._liver("report", self._run, "--json"))
        return figures

    def nothing_left(self) -> None:
        """No job and no allocation; raises DeadlineError that names what stays."""
        deadline = Deadline.after(SystemClock(), 60.0, "the queue to be empty")
        poll_until(lambda: not self._on_login_node("squeue", "--noheader"), deadline, POLL_S)
        say("no job and no allocation is left")


def say(text: str) -> None:
    print(text, flush=True)


def play(demo: Demo) -> None:
    """The events, in their order."""
    blocker = demo.other_job()
    demo.submit()
    demo.workers(2, "two workers train on the stable nodes")
    demo.end(blocker)
    demo.workers(4, "two preemptible nodes were granted and joined")
    preempting = demo.other_job()
    demo.workers(2, "a higher-priority job has taken them back")
    demo.end(preempting)
    demo.workers(4, "they came again")
    demo.resize(6)
    demo.workers(6, "the spare component was joined")
    demo.resize(4)
    demo.workers(4, "and left again")
    demo.stop()


def check(figures: dict[str, Any]) -> None:
    """Raises DemoError unless every event was answered live and in time."""
    notices = figures["notices"]
    bad = [n for n in notices if n["outcome"] not in ("in time", "in use", "not needed")]
    taken = [n for n in notices if n["kind"] == "preempted" and n["outcome"] == "in time"]
    repeated = sum(n["figures"]["repeated_steps"] for n in notices)
    unequal = [r for r in figures["reconfigurations"] if r["outcome"] != "completed"]
    if bad or len(taken) != 2 or repeated or figures["summary"]["completed"] < 5:
        raise DemoError(f"not as it should be: {bad or notices}, {repeated} steps done again")
    for attempt in unequal:
        say(f"note: generation {attempt['generation']} {attempt['outcome']}: {attempt['detail']}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m slurm.demo", description=__doc__)
    parser.add_argument("--name", default="demo", help="name of the test cluster (%(default)s)")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("slurm.demo: error: a test cluster needs root", file=sys.stderr)
        return 2
    demo = Demo(arguments.name)
    try:
        with demo.cluster():
            play(demo)
            demo.nothing_left()
            check(demo.report())
    except LiverError as error:
        print(f"slurm.demo: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
