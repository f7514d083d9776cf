"""What a check has found, and how the line about it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from liver_hpc.errors import LiverError

NAME_WIDTH = 16


class Level(StrEnum):
    PASS = "PASS"
    WARN = "WARN"  # a run works, but not as well as it could
    FAIL = "FAIL"  # a run would not work
    SKIP = "SKIP"  # not looked at, and why


@dataclass(frozen=True)
class Result:
    """What was found, and for WARN and FAIL what to do about it."""

    level: Level
    found: str
    advice: str = ""


def passed(found: str) -> Result:
    return Result(Level.PASS, found)


def warned(found: str, advice: str) -> Result:
    return Result(Level.WARN, found, advice)


def failed(found: str, advice: str) -> Result:
    return Result(Level.FAIL, found, advice)


def skipped(reason: str) -> Result:
    return Result(Level.SKIP, reason)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    result: Result

    def line(self) -> str:
        result = self.result
        advice = f"; do: {result.advice}" if result.advice else ""
        found = " ".join(f"{result.found}{advice}".split())
        return f"{result.level:<4}  {self.check:<{NAME_WIDTH}}  {found}"

    def json(self) -> dict[str, str]:
        result = self.result
        return {
            "check": self.check,
            "level": str(result.level),
            "found": result.found,
            "advice": result.advice,
        }


Context = TypeVar("Context")


@dataclass(frozen=True)
class Check(Generic[Context]):
    """One check: what it looks at, and which others must not have failed before.

    advice: what to do when it could not even look, a LiverError.
    """

    name: str
    look: Callable[[Context], Result]
    needs: tuple[str, ...] = ()
    advice: str = ""


class Examination(Generic[Context]):
    """Checks one after the other; what a failed one stands in the way of is skipped."""

    def __init__(self) -> None:
        self._results: dict[str, Result] = {}

    def run(self, checks: Sequence[Check[Context]], context: Context) -> Iterator[Finding]:
        """Yields each finding as soon as there is one."""
        for check in checks:
            result = self._obstacle(check.needs) or _look(check, context)
            self._results[check.name] = result
            yield Finding(check.name, result)

    def is_well(self, name: str) -> bool:
        """Whether a check has been made and has not failed."""
        result = self._results.get(name)
        return result is not None and result.level in (Level.PASS, Level.WARN)

    def _obstacle(self, needs: Sequence[str]) -> Result | None:
        for name in needs:
            if not self.is_well(name):
                why = "failed" if self._results[name].level is Level.FAIL else "was not made"
                return skipped(f"needs the check of {name}, which {why}")
        return None


def _look(check: Check[Context], context: Context) -> Result:
    try:
        return check.look(context)
    except LiverError as error:
        return failed(str(error), check.advice)
