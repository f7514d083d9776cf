"""A warm process as its parent has it (its inside is `forking.py`): asked to fork, given up."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from liver_hpc.errors import LiverError
from liver_hpc.host.child import Adopted, Child, Command, prctl
from liver_hpc.host.forking import READY, Order, Reply

FORK_S = 10.0
"""The longest that a fork may take."""

_PR_SET_CHILD_SUBREAPER = 36
_MAX_SAID_BYTES = 4096


class ForkRefused(LiverError):
    """A warm process has not forked, and is to be asked no more."""


class WarmProcess(Child):
    """Started; it is ready once it says so on `line`, which is readable then.

    `command` gets the number of a descriptor as its last word. Raises LiverError.
    """

    def __init__(self, command: Command) -> None:
        self.line, its_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.line.settimeout(FORK_S)
        with its_end:
            number = its_end.fileno()
            words = [*command.words, str(number)]
            super().__init__(replace(command, words=words, pass_fds=(number,)))
        self.ready = self._has_forked = False

    def hear(self) -> str:
        """Why it cannot fork; empty where it is ready. For when its line is readable."""
        try:
            said = self.line.recv(_MAX_SAID_BYTES).decode(errors="replace")
        except OSError as error:
            said = str(error)
        self.ready = said == READY
        return "" if self.ready else said or "it has ended"

    def fork(self, command: Command, arguments: Sequence[str], passed: dict[str, int]) -> Child:
        """What `command` would start, as a child of this process, forked.

        command: its environment is what differs from the warm process's, which also has its ignored
        signals. passed: descriptors by the variables that are to tell them. Raises ForkRefused, and
        OSError where the log cannot be opened.
        """
        assert command.log is not None
        assert command.environment is not None
        order = Order(
            words=tuple(command.words),
            arguments=tuple(arguments),
            environment=dict(command.environment),
            descriptors=tuple(passed),
            mark=command.mark,
            instead_of_mark=self.mark,
            group=command.apart == "group",
        )
        command.log.parent.mkdir(exist_ok=True)
        with command.log.open("ab") as log:
            self._has_forked = True
            try:
                with _taking_orphans_in():
                    descriptors = [log.fileno(), *passed.values()]
                    socket.send_fds(self.line, [order.to_json()], descriptors)
                    said = self.line.recv(_MAX_SAID_BYTES)
            except OSError as error:
                raise ForkRefused(f"{self.name}: {error}") from error
        reply = Reply(**json.loads(said or b'{"refused": "it has ended"}'))
        if not reply.pid:
            raise ForkRefused(f"{self.name}: {reply.refused}")
        return Child(command, Adopted(reply.pid))

    def end(self, limit_s: float, first: signal.Signals = signal.SIGTERM) -> list[int]:
        """As of any child until it has forked. Then it is killed at once, and it alone: what it has
        forked just now still has its mark."""
        if not self._has_forked:
            return super().end(limit_s, first)
        killed = [self.pid] if self.exit_code() is None else []
        self.send_signal(signal.SIGKILL)
        self._release()
        return killed

    def _release(self) -> None:
        super()._release()
        self.line.close()


@contextmanager
def _taking_orphans_in() -> Iterator[None]:
    """What is orphaned below this process becomes its child; only for a moment, for nobody waits
    for others."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
