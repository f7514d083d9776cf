"""Mistakes made in the core by hand, one at a time: each is found by playing whole runs.

    python -m tests.unit.run.mutations [NUMBER ...]

copies the package, makes the mistake in the copy, and plays schedules against it until one shows
that something is wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PACKAGE = REPOSITORY / "liver_hpc"
MOST_SCHEDULES = 10_000
"""As many as the test suite plays."""
LIMIT_S = 600.0


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in a file of the package."""

    file: str
    old: str
    new: str
    what: str


MUTATIONS = (
    Mutation(
        "run/machine.py",
        "if self._state is TRAINING and not self._journal_error:",
        "if self._state is TRAINING:",
        "handoffs begin though the journal cannot be written",
    ),
    Mutation(
        "run/machine.py",
        "        if self._state is not ENDED:\n            self.handoffs.tick()",
        "        self.handoffs.tick()\n        if self._state is not ENDED:",
        "a handoff's deadline passes after the end of the run",
    ),
    Mutation(
        "run/lifecycle.py",
        "        self._set_deadline(self._stop_limit_s(self.world, self._stop_saves))\n",
        "",
        "nobody minds how long a run takes to stop",
    ),
    Mutation(
        "run/decide.py",
        "        if doomed:\n",
        "        if doomed and self.queue.first is None:\n",
        "what was asked for comes before nodes that have to be left",
    ),
    Mutation(
        "run/decide.py",
        "best = self.estimates.policy.best(min(room, self.queue.ceiling))",
        "best = self.estimates.policy.best(room)",
        "the run grows beyond what was asked for last",
    ),
    Mutation(
        "run/elastic.py",
        "hurries = window_s < before_s / 2",
        "hurries = False",
        "a node that is suddenly taken away waits behind another handoff",
    ),
    Mutation(
        "run/elastic.py",
        "        if node.name in self.drained:  #",
        "        if node.name not in self.drained:  #",
        "a node that an operator has drained is used when it comes again",
    ),
    Mutation(
        "run/agents.py",
        "            if ending or not (boots or agent.end_by is not None):\n",
        "            if not (boots or agent.end_by is not None):\n",
        "the slots of agents that are ending are given away",
    ),
    Mutation(
        "run/agents.py",
        "            if name in lost:\n                del self._agents[name]\n",
        "            if name in lost:\n                continue\n",
        "agents that were never started keep their slots",
    ),
    Mutation(
        "run/nodes.py",
        "(slot for slot in numbers if slot not in used)",
        "(slot for slot in numbers)",
        "a slot is given to two agents at once",
    ),
    Mutation(
        "run/requests.py",
        "        self.waiting.append(request)\n",
        "        self.waiting.insert(0, request)\n",
        "who asked last is granted first",
    ),
    Mutation(
        "run/handoffs.py",
        "        if attempt is not None and message.generation == attempt.generation:\n",
        "        if attempt is not None:\n",
        "messages of the attempt before are taken for those of this one",
    ),
    Mutation(
        "run/handoffs.py",
        "        self._agents.take(here)\n",
        "",
        "a joiner with a seat is kept for another handoff",
    ),
    Mutation(
        "run/elastic.py",
        "        self._agents.let_go(there, leave)\n",
        "",
        "joiners without a seat stay on a node that has to be left",
    ),
    Mutation(
        "run/notices.py",
        'return "late" if notice.left_s > notice.deadline_s else "in time"',
        'return "late" if notice.left_s < notice.deadline_s else "in time"',
        "a node that was left too late was left in time",
    ),
    Mutation(
        "protocol/machine.py",
        "        if not event.ok:\n            return self._abort",
        "        if event.ok is None:\n            return self._abort",
        "a handoff commits though somebody has voted no",
    ),
    Mutation(
        "protocol/machine.py",
        "        if found:\n            return self._abort",
        "        if len(found) < 0:\n            return self._abort",
        "a handoff commits though the digests differ",
    ),
    Mutation(
        "protocol/machine.py",
        "        actions: list[Action] = [Send(waiting, resume)] if waiting else []\n",
        "        actions: list[Action] = []\n",
        "nobody is told to go back to the source world",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What playing against a mutation came to. schedules: how many it took, -1 for none."""

    schedules: int
    said: str


def try_out(mutation: Mutation) -> Outcome:
    """Plays against a copy of the package with the mutation in it, in another process."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        shutil.copytree(PACKAGE, copy / "liver_hpc", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "tests").symlink_to(REPOSITORY / "tests")
        path = copy / "liver_hpc" / mutation.file
        path.write_text(mutated(mutation, path.read_text()))
        command = [sys.executable, "-m", "tests.unit.run.mutations", "--play"]
        played = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert played.returncode == 0, played.stderr
    number, _, said = played.stdout.partition(" ")
    return Outcome(int(number), said.strip())


def mutated(mutation: Mutation, text: str) -> str:
    found = text.count(mutation.old)
    assert found == 1, f"{mutation.file}: wanted {mutation.old!r} once, got it {found} times"
    return text.replace(mutation.old, mutation.new)


def play() -> None:
    """In the other process: says at which schedule what was found to be wrong."""
    from tests.unit.run.endings import schedule

    for number in range(MOST_SCHEDULES):
        rng = random.Random(number)
        try:
            schedule(rng.randbytes(rng.randrange(64, 192)))
        except Exception as error:  # noqa: BLE001  (whatever it is: it was found)
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(number + 1, f"{type(error).__name__}: {str(error)[:300]} in {place.name}")
            return
    print(-1, "")


def main(numbers: list[str]) -> int:
    missed = 0
    for number, mutation in enumerate(MUTATIONS, start=1):
        if numbers and str(number) not in numbers:
            continue
        outcome = try_out(mutation)
        missed += outcome.schedules < 0
        caught = f"schedule {outcome.schedules}: {outcome.said}" if outcome.said else "MISSED"
        print(f"{number:2d} {mutation.file}: {mutation.what}\n   {caught}", flush=True)
    return missed


if __name__ == "__main__":
    if sys.argv[1:] == ["--play"]:
        play()
    else:
        sys.exit(main(sys.argv[1:]))
