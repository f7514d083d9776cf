"""The exception tree: everything that liver_hpc raises on purpose derives from `LiverError`."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LiverError(Exception):
    """Base of every error raised on purpose; its text is meant for the person at the terminal."""


class ConfigError(LiverError):
    """A run file, a command-line value or a data file is wrong; nothing was launched.

    args: the problems, each a line of its own where there are several.
    """

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return f"{len(self.args)} problems\n" + "\n".join(f"  {each}" for each in self.args)


@contextmanager
def problems_of(file: Path) -> Iterator[None]:
    """Whatever turns out to be wrong inside is said to be so in this file, unless it says where
    already: in a line of the file, or in an override."""
    try:
        yield
    except ConfigError as error:
        known = (f"{file}:", "--set ")
        texts = map(str, error.args)
        problems = (text if text.startswith(known) else f"{file}: {text}" for text in texts)
        raise ConfigError(*problems) from error


class PlanError(LiverError):
    """A transfer plan does not fit the state that exists: who, wanted, got."""


class ProtocolError(LiverError):
    """A message or an event that the present phase does not allow, with the history."""


class DeadlineError(LiverError):
    """A wait ended at its deadline; the text names whom it waited for."""


class StoreAway(DeadlineError):
    """There is no coordinator just now, whose the store is. That of the next one is empty."""


class MeetingError(LiverError):
    """A joiner and the rendezvous did not come together: bad proof, no answer, dead peer."""


class NoRoom(LiverError):
    """A device cannot hold both worlds of a handoff, but would do with bounded memory."""


class TransferError(LiverError):
    """Bytes could not be moved between two workers."""


class CheckpointError(LiverError):
    """A checkpoint cannot be read, is damaged, or is of another model.

    What it quotes may be somebody else's: what would steer a terminal, or begin a line of a log,
    stands in the text as Python writes it.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class CheckpointOfAnotherRelease(CheckpointError):
    """A later release has written it, which can read it: it is not passed over."""


class CheckpointUnread(CheckpointError):
    """A file system does not give what a checkpoint holds just now: it may be whole."""


class RequestRefused(LiverError):
    """The coordinator declined an operator's request; the running job is undisturbed."""


MODELS_ERRORS = (
    LiverError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a model's own code raises where it cannot be built, or laid out so."""

_NOT_THE_USERS = sys.stdlib_module_names | {"liver_hpc", "megatron", "torch", "numpy"}
_MOST_TOLD = 1000


def told_of(error: BaseException) -> str:
    """What a process tells others of an error that its log has whole: in one line, no more than
    1,000 characters of it, with its kind and its place in a user's code. One without words, as a
    bare `assert` raises, is told by the statement that raised it."""
    words = f"{type(error).__name__}: {str(error) or _statement(error)}"
    said, place = " ".join(words.split())[:_MOST_TOLD], place_in_users_code(error)
    return said.removesuffix(place) + place


def _statement(error: BaseException) -> str:
    """What raised it, as it stands in its file, and where; empty where that is not to be had."""
    for raised in traceback.extract_tb(error.__traceback__)[-1:]:
        first = raised.lineno or 0
        lines = range(first, (raised.end_lineno or first) + 1)
        text = "".join(linecache.getline(raised.filename, line) for line in lines)
        return f"{text} ({raised.filename}, line {first})"
    return ""


def place_in_users_code(error: BaseException) -> str:
    """Where what raised it was called, in a recipe or script: " (FILE, line N)"; nothing where no
    such code called it."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _top_package(frame.f_globals) not in _NOT_THE_USERS
    ]
    return f" ({frames[-1][0]}, line {frames[-1][1]})" if frames else ""


def _top_package(names: Mapping[str, Any]) -> str:
    """Of a module with these globals, also of one that is run as the program."""
    return str(names.get("__package__") or names.get("__name__")).partition(".")[0]
