"""On PYTHONPATH: a host without torch, whose nodes have it. Torch can be imported by agents, by all
below them, and by the task that derives a spec; in any other process there is none."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

ABSENT = ("torch", "megatron", "megatron-core")


def on_a_node() -> bool:
    pid = os.getpid()
    while pid > 1:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"liver_hpc.node.agent" in words or any(w.endswith(b"/derived.json") for w in words):
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide() -> None:
    from_name = importlib.metadata.Distribution.from_name

    def from_known_name(name: str) -> importlib.metadata.Distribution:
        if name in ABSENT:
            raise importlib.metadata.PackageNotFoundError(name)
        return from_name(name)

    sys.meta_path.insert(0, Absent())
    importlib.metadata.Distribution.from_name = staticmethod(from_known_name)  # type: ignore[assignment]


if not on_a_node():
    hide()
