"""The run file as a page shows it that is handed around: without what may hold secrets."""

from __future__ import annotations

from typing import Any

import yaml

HIDDEN = "not shown here"
_LINES, _CHECK, _EXPORT = "setup", "health_check", "export"
_OPTIONS = ("options", "step_options")


def shown_config(text: str) -> str:
    """A run file's text with the lines of shell that sites log in with (`setup`, `health_check`),
    the environment that sbatch and srun are given (`export`), and that a container is (its
    options), replaced; as it is where there are none, or where it is no run file.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return yaml.safe_dump(document, sort_keys=False) if _hide(document) else text


def _hide(value: Any) -> bool:
    """Hides what is to be hidden in a part of the file; whether there was any."""
    if isinstance(value, list):
        hidden = [_hide(each) for each in value]
        return any(hidden)
    if not isinstance(value, dict):
        return False
    hidden = [_hide(each) for each in value.values()]
    if value.get(_LINES):
        value[_LINES] = [f"({len(value[_LINES])} lines, {HIDDEN})"]
        hidden.append(True)
    if value.get(_CHECK):
        value[_CHECK] = HIDDEN
        hidden.append(True)
    for name in _OPTIONS:
        options = value.get(name)
        if isinstance(options, dict) and _EXPORT in options:
            options[_EXPORT] = HIDDEN
            hidden.append(True)
        elif isinstance(options, list) and options:
            value[name] = [f"({len(options)}, {HIDDEN})"]
            hidden.append(True)
    return any(hidden)
