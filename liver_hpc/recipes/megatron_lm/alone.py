"""A thread that acts alone, in a process of several: as a script of Megatron-LM is run."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liver_hpc.world import module_globals, thread


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """On this thread, torch.distributed is not initialized: what asks acts for itself, and waits
    for nobody. Who asks for its rank all the same is the first of one. Signal handlers are not
    installed: those of the process are ours, and a thread that prepares a world may not."""
    _ask_the_thread()
    thread.here.alone = True
    try:
        yield
    finally:
        thread.here.alone = False


def _ask_the_thread() -> None:
    """Once a process."""
    for module, name, answer in (
        (torch.distributed, "is_initialized", lambda: False),
        (torch.distributed, "get_rank", lambda *_: 0),
        (torch.distributed, "get_world_size", lambda *_: 1),
        (signal, "signal", lambda number, _handler: signal.getsignal(number)),
    ):
        plain = getattr(module, name)
        if not hasattr(plain, "asks_the_thread"):
            setattr(module, name, _asking_the_thread(plain, answer))


def _asking_the_thread(plain: Callable[..., Any], answer: Callable[..., Any]) -> Any:
    @functools.wraps(plain)
    def ask(*args: Any, **options: Any) -> Any:
        return (answer if thread.here.alone else plain)(*args, **options)

    ask.asks_the_thread = True  # type: ignore[attr-defined]
    return ask


def heard(stream: Any, hear: Callable[[str], Any]) -> Any:
    """The stream, for all that write to it but a thread that acts alone: what that one writes is
    heard."""

    def write(text: str) -> Any:
        return hear(text) if thread.here.alone else stream.write(text)

    return module_globals.Instead(stream, write=write)
