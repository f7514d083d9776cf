"""Pure: what srun's own words, with --verbose, say of the tasks of its step."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from liver_hpc.cluster.launcher import KILLED

# Only srun's and slurmstepd's own words count, not what a task prints.
_TASK = re.compile(r"^srun: (?:[^:]+: )*?([^:\s]+): tasks? [\d,\-\[\]]+: (.+)$", re.M)
_NODE_LOST = re.compile(r"^srun: (?:error: )?Node failure on (\S+)$", re.M)
_STEP_LOST = re.compile(r"^(srun|slurmstepd[^:]*): .*(node failure|node fail)", re.I | re.M)
# That a node could not be told of its task ends a step that has begun on others.
_UNREACHABLE = re.compile(
    r"^srun: error: (?!Task launch|Application launch)"
    r".*(Unable to contact slurm controller|Socket timed out"
    r"|Zero Bytes were transmitted|Connection refused|Slurm temporarily unable)",
    re.M,
)
# A controller that has just come back knows its nodes only by name for a while.
_NOT_CREATED = re.compile(r"^srun: error: Unable to (create step|confirm allocation) for job", re.M)
_ERROR = re.compile(r"^(?:srun|slurmstepd[^:]*): error: (.+)$", re.M)

_NOTICE = re.compile(r"^srun: .*Received task exit notification .*\(status=0x(\w+)\)", re.M)
_NAMED_OUT_OF_MEMORY = re.compile(r"^srun: .*: Out Of Memory$", re.M)
_OUT_OF_MEMORY = 0xFD
"""SIG_OOM of Slurm, in the place of a signal."""

_EXITED = "Exited with exit code "
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


def task_ends(said: str) -> Iterator[tuple[str, int]]:
    """Of nodes, as srun writes them ("n[1-3]" may be several), the exit codes of their tasks."""
    for nodes, how in _TASK.findall(said):
        if how == "Completed":
            yield nodes, 0
        elif how.startswith(_EXITED):
            yield nodes, int(how.removeprefix(_EXITED).split()[0])
        else:
            number = _SIGNALS.get(how.removesuffix(" (core dumped)"))
            yield nodes, KILLED if number is None else 128 + number
    for nodes in _NODE_LOST.findall(said):
        yield nodes, KILLED


def unnamed_ends(said: str) -> int:
    """How many tasks have ended whom srun does not name: of those of a step that end out of memory,
    or on a node where the kernel has killed anything of it for that, it names the first alone."""
    out_of_memory = [how for how in _NOTICE.findall(said) if int(how, 16) & 0xFF == _OUT_OF_MEMORY]
    return len(out_of_memory) - len(_NAMED_OUT_OF_MEMORY.findall(said))


def is_lost(said: str) -> bool:
    """Whether a node of the step is."""
    return _STEP_LOST.search(said) is not None


def found_no_controller(said: str) -> bool:
    return _UNREACHABLE.search(said) is not None


def created_no_step(said: str) -> bool:
    """Whether Slurm has refused, which may be for a while."""
    return _NOT_CREATED.search(said) is not None


def last_error(said: str) -> str:
    """What went wrong last, in Slurm's words; empty for nothing."""
    found = [text for text in _ERROR.findall(said) if ": task" not in text]
    return found[-1] if found else ""
