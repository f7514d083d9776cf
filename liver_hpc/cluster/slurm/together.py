"""The agents that one srun starts: a file in the run directory says which one belongs on which
node. Each task looks itself up there; another coordinator learns from it what was started together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from liver_hpc.errors import LiverError
from liver_hpc.host.files import write_whole
from liver_hpc.run.actions import LaunchAgent

NODE_VARIABLE = "SLURMD_NODENAME"
"""In every task: the node's name, as Slurm's configuration has it."""

STEP_VARIABLE = "LIVER_STEP"
"""In every task, and in what it starts: its job, and the name of its step, as "12.liver-a0"."""

_FOLDER = "steps"


class Together(NamedTuple):
    """A step, and the agents that were started in it by their nodes."""

    step: str
    agents: dict[str, str]


@dataclass(frozen=True)
class _Told:
    agent: str
    slots: tuple[int, ...]


_TOLD = TypeAdapter(dict[str, _Told])


def together_path(run_directory: Path, step: str) -> Path:
    return run_directory / _FOLDER / f"{step}.json"


def note_together(path: Path, launches: Sequence[LaunchAgent]) -> None:
    """Before they are started, each on a node of its own. Raises OSError."""
    told = {each.seat.node: _Told(each.agent, each.seat.slots) for each in launches}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, _TOLD.dump_json(told, indent=1), mode=0o600)


def own_agent(path: Path, environment: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
    """Of a task: its agent's name and slots. Raises LiverError where it has none."""
    node, told = environment.get(NODE_VARIABLE, ""), _read(path)
    if node not in told:
        raise LiverError(
            f"{path}: wanted this task's node ({NODE_VARIABLE}={node!r}), got {', '.join(told)}"
        )
    return told[node].agent, told[node].slots


def told_together(run_directory: Path) -> dict[str, Together]:
    """By agent, of all that were ever started. Raises LiverError."""
    found: dict[str, Together] = {}
    folder = run_directory / _FOLDER
    try:  # not `glob`, which from Python 3.12 on takes what cannot be read for empty
        paths = [*folder.iterdir()]
    except FileNotFoundError:
        return found
    except OSError as error:
        raise LiverError(f"{folder}: which agents run where cannot be read: {error}") from error
    for path in (each for each in paths if each.suffix == ".json"):
        agents = {node: told.agent for node, told in _read(path).items()}
        found |= dict.fromkeys(agents.values(), Together(path.stem, agents))
    return found


def _read(path: Path) -> dict[str, _Told]:
    try:
        return _TOLD.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise LiverError(f"{path}: which agents run where cannot be read: {error}") from error
