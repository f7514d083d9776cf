"""Processes of ours that import torch: forked from one that has, which spares them seconds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from benchmarks.transitions.pool import forking
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.host.child import Child, Command


class Forked:
    """In the place of a `Child` that is `python -P -m MODULE WORDS` and has a log."""

    def __init__(self, command: Command) -> None:
        self._name = command.name
        module, *words = command.words[command.words.index("-m") + 1 :]
        arguments = (module, words, str(command.log), dict(os.environ))
        self._process = forking().Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    def wait(self, limit_s: float) -> int:
        deadline = Deadline.after(SystemClock(), limit_s, self._name)
        self._process.join(limit_s)
        if self._process.exitcode is None:
            raise deadline.error()
        return self._process.exitcode

    def end(self, _limit_s: float) -> None:
        self._process.kill()
        self._process.join()


def child(command: Command) -> Child | Forked:
    """A PYTHONPATH is for processes that begin anew."""
    return Child(command) if "PYTHONPATH" in os.environ else Forked(command)


def _run(module: str, words: Sequence[str], log: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *words]
    sys.exit(importlib.import_module(module).main())
