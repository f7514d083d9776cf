"""What torch (`ProcessGroupNCCL.cpp`, 2.11 to 2.13) and NCCL (`group.cc`) keep of groups."""

from __future__ import annotations


class NcclGroups:
    """Those of one thread. open: what is launched while there is one never runs. counted: how many
    of them torch has begun as batches, and knows of."""

    def __init__(self) -> None:
        self.open = self.counted = 0
        self._refused = False

    def start(self) -> None:
        """A batch begins."""
        self.open += 1
        self.counted += 1

    def message(self, refused: bool = False) -> None:
        """torch begins a group around each, and ends it where NCCL does not refuse."""
        self.open += 1
        self._refused = self._refused or refused
        if refused:
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        self.open -= 1

    def end(self, launches: bool = True) -> None:
        """A batch ends, or what is left open does. launches: whether NCCL can launch it."""
        if not self.open:
            raise RuntimeError("NCCL error: invalid usage: not in a group call")
        self.open -= 1
        if not self.open and (self._refused or not launches):
            self._refused = False
            raise RuntimeError("NCCL error: the group has failed")
        self.counted -= 1  # of an unsigned number
        assert self.counted >= 0, "nothing can connect in this thread any more"

    def connect(self) -> None:
        """Before a communicator comes to be, torch ends all groups that it knows of."""
        if self.counted > self.open:
            raise RuntimeError("NCCL error: invalid usage: not in a group call")
