"""The `model` section of a run that trains by a script of Megatron-LM."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from liver_hpc.config.schema import as_written
from liver_hpc.recipes.megatron_lm.words import with_absolute_paths

_CONTINUED = re.compile(r"\\\r?\n")
_COMMENT_OR_WORD = re.compile(
    r"""\#[^\n]* | ( (?: \\(?!\r?\n). | "(?:\\.|[^"\\])*" | '[^']*' | [^\s"'\\] )+ )""",
    re.DOTALL | re.VERBOSE,
)
"""A comment begins where a word would, as in a shell; no line goes on behind it."""


class ArgumentsFile(BaseModel):
    """Arguments in a file: words as a shell has them, over any number of lines, with # comments;
    a variable is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path


def _absolute(path: Path) -> Path:
    return Path(os.path.expanduser(path)).absolute()


class ScriptOptions(BaseModel):
    """The script, the checkout of Megatron-LM that it belongs to, and the arguments as the job has
    them: one string, a list, or a file of them.

    megatron_lm: where `megatron/training` lies; the script's own directory unless it is given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: Path
    megatron_lm: Path | None = None
    args: str | list[str | int | float] | ArgumentsFile = []

    @field_validator("script", "megatron_lm")
    @classmethod
    def _one_meaning(cls, path: Path | None) -> Path | None:
        """The same in every process, whatever its directory."""
        return None if path is None else _absolute(path)

    @field_validator("args", mode="before")
    @classmethod
    def _no_truth_for_a_word(cls, given: Any) -> Any:
        """`yes` and `on` of YAML would count as 1."""
        for word in given if isinstance(given, list) else ():
            if isinstance(word, bool):
                raise ValueError(f"wanted a word, got {str(word).lower()}; quote it")
        return given

    @field_validator("args")
    @classmethod
    def _split(cls, given: str | list[str | int | float] | ArgumentsFile) -> list[str]:
        if isinstance(given, list):
            return with_absolute_paths([as_written(str(word)) for word in given])
        where = ""
        if isinstance(given, ArgumentsFile):
            file = _absolute(given.file)
            where = f"{file}: "
            try:
                given = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from None
        text = _COMMENT_OR_WORD.sub(lambda found: found[1] or "", given)
        try:
            words = shlex.split(_CONTINUED.sub(" ", text))
        except ValueError as error:  # a quote that is not closed
            raise ValueError(f"{where}wanted words as a shell has them: {error}") from None
        return with_absolute_paths([as_written(word, where) for word in words])

    @property
    def words(self) -> list[str]:
        """The arguments, one by one."""
        assert isinstance(self.args, list)
        return [str(word) for word in self.args]

    @property
    def checkout(self) -> Path:
        """The directory that has `megatron/training`."""
        return self.megatron_lm or self.script.parent
