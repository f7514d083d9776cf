"""How a world's state goes to disk and comes back: one interface for all methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from liver_hpc.protocol.messages import ScalarState
from liver_hpc.world.world import World


class SaveInProgress(ABC):
    """An asynchronous save. Both calls are collective over the world."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the checkpoint is complete; True at the same call on all workers."""


class Storage(ABC):
    """Saves and loads one world. The calls that take a world are collective over it, and it is the
    whole of the default group."""

    def prepare_save(self) -> None:  # noqa: B027 - most have nothing to make ready
        """Beside training: what the first save of a process would make, and the next ones find."""

    @abstractmethod
    def save(self, world: World, small: ScalarState, directory: Path) -> None:
        """Writes everything; complete on return on every worker. `directory` exists, empty."""

    @abstractmethod
    def load(self, world: World, directory: Path) -> ScalarState:
        """Fills a world of any layout, bit-equal to what was saved."""

    def begin_save(self, world: World, small: ScalarState, directory: Path) -> SaveInProgress:
        """Starts a save beside training; returns when the state may change again.

        Raises NotImplementedError where the method has none.
        """
        raise NotImplementedError(f"{type(self).__name__} saves synchronously only")
