"""Values on the command line, and what is said of those that are none; imports nothing that takes
time."""

from __future__ import annotations

from argparse import ArgumentTypeError


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(text)


def worker_id(text: str) -> int:
    """A whole number."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"wanted a worker id such as 3, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A number above 0 with an end."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"wanted a number of seconds above 0, got {text!r}")
    return number
