"""The words of a Megatron-LM job: options with their values, without a parser of Megatron's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.errors import ConfigError

_OPTION = re.compile(r"--?[A-Za-z]")
_PATHS = frozenset(
    {
        "load",
        "save",
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "data_args_path",
        "per_split_data_args_path",
        "per_dataset_sequences_path",
        "data_cache_path",
        "vocab_file",
        "merge_file",
        "tokenizer_metadata",
    }
)
"""Options whose values are paths; other values with a slash are where there is such a file."""
_TOKENIZER = "tokenizer_model"
"""A file or a directory where there is one of that name, with a slash or without; else a name."""


@dataclass(frozen=True)
class Given:
    """One option as it stands among the words."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """As Megatron's parser names its destination, but for those that it names otherwise."""
        return self.words[0].partition("=")[0].lstrip("-").replace("-", "_")

    @property
    def values(self) -> tuple[str, ...]:
        _, equals, value = self.words[0].partition("=")
        return (*((value,) if equals else ()), *self.words[1:])

    def __str__(self) -> str:
        return " ".join(self.words)


def options_of(words: Sequence[str]) -> list[Given]:
    """The options in their order. Raises ConfigError for a word before the first one."""
    found: list[list[str]] = []
    for word in words:
        if _OPTION.match(word):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            raise ConfigError(f"wanted an option such as --num-layers, got {word!r}")
    return [Given(tuple(each)) for each in found]


def number_of(words: Sequence[str], name: str) -> int | None:
    """The whole number that an option has; None where it has none. The last one counts."""
    given = [option.values for option in options_of(words) if option.name == name]
    return int(given[-1][0]) if given and given[-1] and given[-1][0].isdecimal() else None


def with_absolute_paths(words: Sequence[str]) -> list[str]:
    """The same job from any directory; a word that is wrong stays, and is refused later."""
    first = next((at for at, word in enumerate(words) if _OPTION.match(word)), len(words))
    kept = list(words[:first])
    for option in options_of(words[first:]):
        kept += _absolute_words(option)
    return kept


def _absolute_words(option: Given) -> Iterator[str]:
    first, equals, value = option.words[0].partition("=")
    yield f"{first}={_absolute(option.name, value)}" if equals else first
    yield from (_absolute(option.name, word) for word in option.words[1:])


def _absolute(name: str, value: str) -> str:
    if "://" in value or not value or is_number(value):  # an object store's; a blend's weight
        return value
    path = Path(os.path.expanduser(value))
    is_one = name in _PATHS or (("/" in value or name == _TOKENIZER) and path.exists())
    return str(path.absolute()) if is_one else value


def is_number(word: str) -> bool:
    """Whether Megatron would take a word among a blend's for a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True
