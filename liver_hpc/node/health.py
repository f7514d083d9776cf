"""Whether a node is well: the run file's command says so, before anything is started there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command

_LAST_LINES = 5
_MOST_CHARACTERS = 500
_VARIABLE = "LIVER_HEALTH_CHECK"


class Unhealthy(LiverError):
    """The node has failed its check."""


def check_health(
    command: str, log: Path, limit_s: float, begun: Callable[[Child], None] = lambda _child: None
) -> None:
    """Runs the command in a shell; what it prints goes to `log`. Raises Unhealthy where it fails,
    or does not end in time, and then nothing of it is left that can be killed.

    begun: gets the shell, which whoever cannot wait for its end ends.
    """
    # Others see command lines, and it may hold what is not for them.
    words = ["/bin/sh", "-c", f'eval "${_VARIABLE}"']
    environment = {**os.environ, _VARIABLE: command}
    told = Command("health check", words, environment=environment, log=log, apart="group")
    try:
        child = Child(told)
    except LiverError as error:
        raise Unhealthy(f"node {socket.gethostname()}: {error}") from error
    begun(child)
    try:
        code = child.wait(limit_s)
        how = child.how()
    except DeadlineError:
        code, how = -1, f"no end in {limit_s:g} s (deadlines.health_s)"
    try:
        child.end(0.0)
    except DeadlineError as error:  # it is stuck in the kernel, as its driver or file system may be
        code, how = -1, f"{how}; {error}"
    if code != 0:
        said = " | ".join(_last_lines(log)) or "it said nothing"
        raise Unhealthy(
            f"node {socket.gethostname()} fails its health check ({how}): {said}; "
            f"see logs/{log.name}"
        )


def _last_lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return text[-_MOST_CHARACTERS:].splitlines()[-_LAST_LINES:]
