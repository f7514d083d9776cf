"""Which of a job's options an elastic run has, which it refuses, and which have no effect in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from liver_hpc.recipes.megatron_lm.owned import LISTS, NUMBERS, RAMP, SWITCHES
from liver_hpc.recipes.megatron_lm.tables import LAYOUT, NO_EFFECT, PASSED, REFUSED, Group
from liver_hpc.recipes.megatron_lm.words import Given, options_of


@dataclass(frozen=True)
class Entry:
    """What the tables say of an option; `allowed` are the values of it that can be had."""

    group: Group
    allowed: tuple[str, ...] = ()

    def refuses(self, values: Iterable[Any]) -> bool:
        return self.group in REFUSED and not (
            self.allowed and all(_is_one_of(value, self.allowed) for value in values)
        )


def _entries() -> Iterator[tuple[str, Entry]]:
    for group in (*PASSED, LAYOUT, *NO_EFFECT, *REFUSED):
        for word in group.names.split():
            name, _, allowed = word.partition("=")
            yield name, Entry(group, tuple(filter(None, allowed.split("|"))))


ENTRIES = tuple(_entries())
"""Every name and pattern of the tables, in their order."""
_OWNED = (*NUMBERS, *SWITCHES, *LISTS, RAMP, "persistent_save_interval")
_EXACT = dict.fromkeys(_OWNED, Entry(Group("a key of the run file follows from it", "")))
_EXACT |= {name: entry for name, entry in ENTRIES if "*" not in name}
_PATTERNS = [(name, entry) for name, entry in ENTRIES if "*" in name]


def entry_of(name: str) -> Entry | None:
    """What the tables say of an option by its name in the parser, or on the command line."""
    for known in (name, name.removeprefix("no_"), name.removeprefix("disable_")):
        if known in _EXACT:
            return _EXACT[known]
        if found := next((e for pattern, e in _PATTERNS if fnmatchcase(known, pattern)), None):
            return found
    return None


# ---- of the words, without torch


def refused_words(words: Sequence[str]) -> list[str]:
    """The options among the words that cannot be had, each with why."""
    problems = []
    for option in options_of(words):
        entry = entry_of(option.name)
        if entry is not None and entry.refuses(option.values):
            problems.append(_refusal(str(option), entry.group))
    return list(dict.fromkeys(problems))


def without_layout(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those about layouts, and these."""
    kept, dropped = list[str](), list[str]()
    for option in options_of(words):
        (dropped if _says(option, LAYOUT) else kept).extend(option.words)
    return kept, dropped


def notes_of_options(words: Sequence[str]) -> list[str]:
    """What a user should know of options that are not what they were."""
    notes = []
    if dropped := without_layout(words)[1]:
        notes.append(f"model.args: {LAYOUT.why}, so these are left out: {' '.join(dropped)}")
    for group in NO_EFFECT:
        idle = [each for each in options_of(words) if _says(each, group)]
        if idle:
            told = " ".join(each.words[0].partition("=")[0] for each in idle)
            notes.append(f"model.args: without effect here, as {group.why}: {told}")
    return notes


def _says(option: Given, group: Group) -> bool:
    entry = entry_of(option.name)
    return entry is not None and entry.group is group


def _refusal(option: str, group: Group) -> str:
    instead = f"; instead: {group.instead}" if group.instead else ""
    return f"{option}: not supported, {group.why}{instead}"


# ---- of what Megatron's parser made of them


def judged(parsed: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """What cannot be had of a namespace of Megatron's parser, whoever set it.

    parsed: before `validate_args`, which fills in what follows, but with the script's
    `args_defaults`; defaults: the same parser's namespace of no words.
    """
    problems = []
    for name, default in defaults.items():
        if name not in parsed or parsed[name] == default:
            continue
        entry, value = entry_of(name), parsed[name]
        told = f"--{name.replace('_', '-')} {value}"
        if entry is None:
            problems.append(f"{told}: not known to be supported")
        elif entry.refuses(value if isinstance(value, list | tuple) else [value]):
            problems.append(_refusal(told, entry.group))
    return problems


def _is_one_of(value: Any, allowed: Sequence[str]) -> bool:
    """A value is a word, or what Megatron made of one."""
    if str(value) in allowed:
        return True
    try:
        return float(value) in map(float, allowed)
    except (TypeError, ValueError):
        return False
