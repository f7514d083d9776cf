"""A script of Megatron-LM as its owner runs it, by torchrun, in one fixed layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.script.bootstrap import SCALARS
from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.process import clean_environment

LOG = "plain.log"
_TAIL_LINES = 30
_TORCHRUN_SAYS = "] failed (exitcode: "
_REPOSITORY = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class PlainJob:
    """`pretrain_gpt.py` of a checkout, in an environment whose megatron-core is the checkout's.
    words: its arguments, those of the layout and of checkpoints among them; what a CPU wants, and
    where scalars go, is put behind them."""

    checkout: Path
    words: Sequence[str]
    ranks: int = 1

    def command(self, directory: Path) -> list[str]:
        """torchrun's words."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", f"--nproc-per-node={self.ranks}"),
            *("-m", "benchmarks.script.bootstrap", str(self.checkout / "pretrain_gpt.py")),
            *self.words,
            *("--distributed-backend", "gloo"),
            *("--tensorboard-dir", str(directory), "--tensorboard-log-interval", "1"),
        ]

    def environment(self) -> dict[str, str]:
        """One thread a process, and the checkout's own `megatron` before any other."""
        inherited = os.environ.get("PYTHONPATH")
        path = [str(self.checkout), str(_REPOSITORY), *([inherited] if inherited else [])]
        return clean_environment(os.environ) | {
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # which the script wants with tp, of CUDA alone
        }


@dataclass(frozen=True)
class PlainRun:
    """What the script said, by the number of steps done, as float32 holds it.

    validation_losses: the first after each step. scalars: all that TensorBoard was told, by its
    name.
    """

    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    validation_losses: Mapping[int, float]
    scalars: Mapping[str, Mapping[int, float]] = field(default_factory=dict, compare=False)


def start_plain(job: PlainJob, directory: Path) -> Child:
    """torchrun of the job; its output goes to `directory`/plain.log."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG
    log.unlink(missing_ok=True)
    (directory / SCALARS).unlink(missing_ok=True)
    words = job.command(directory)
    return Child(Command("torchrun", words, environment=job.environment(), log=log))


def run_plain(job: PlainJob, directory: Path, deadline: Deadline) -> PlainRun:
    """Runs the job to its end.

    Raises LiverError when it fails, DeadlineError when it is late: both with the log's end.
    """
    child = start_plain(job, directory)
    try:
        code = child.wait(deadline.remaining_s())
    except DeadlineError as error:
        raise DeadlineError(f"{error}\n{_tail(directory / LOG)}") from None
    finally:
        child.end(0)
    if code:
        raise failure(child, directory)
    return read_scalars((directory / SCALARS).read_text(encoding="utf-8").splitlines())


def failure(child: Child, directory: Path) -> LiverError:
    """Of a job that has ended, with its log's end."""
    log = directory / LOG
    return LiverError(f"the plain script ended with {child.how()}; {log}:\n{_tail(log)}")


def read_scalars(lines: Iterable[str]) -> PlainRun:
    """Of lines of `bootstrap.ScalarFile`."""
    kinds: dict[str, dict[int, float]] = {
        name: {} for name in ("lm loss", "grad-norm", "lm loss validation")
    }
    for entry in map(json.loads, lines):
        kinds.setdefault(entry["name"], {}).setdefault(entry["step"], entry["value"])
    return PlainRun(kinds["lm loss"], kinds["grad-norm"], kinds["lm loss validation"], kinds)


def _tail(log: Path) -> str:
    """The last lines before torchrun's own words on a failure."""
    text = log.read_text(encoding="utf-8", errors="replace").partition(_TORCHRUN_SAYS)[0]
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
