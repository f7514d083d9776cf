"""What the benchmark learns of the run while it goes on, from the lines that the journal gains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liver_hpc.run.codec import rows_of
from liver_hpc.run.entries import JOURNAL_FILE, decode


class Tail:
    """step: the newest that is done. generation: of the world that did it. whole: steps that this
    world has done. pids: of workers. nodes: of agents. restarts: starts from the disk."""

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / JOURNAL_FILE
        self._offset = self._lines = 0
        self.step = self.generation = -1
        self.whole = self.restarts = self.recoveries = 0
        self.pids: dict[int, int] = {}
        self.nodes: dict[str, str] = {}

    def read(self) -> None:
        """What has come since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        lines = (whole + end).splitlines(keepends=True)
        for entry in decode(lines, f"{self._path}, line", self._lines):
            self._event(entry.event)
            for action in entry.actions:
                self._action(action)
        self._lines += len(lines)

    def _event(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "step_done":
                if event["generation"] != self.generation:
                    self.whole, self.generation = 0, event["generation"]
                self.step, self.whole = event["step"], self.whole + 1
            case "hello":
                self.pids[int(event["worker"])] = int(event["pid"])
            case "coordinator_started":
                self.restarts += 1

    def _action(self, action: Mapping[str, Any]) -> None:
        match action["type"]:
            case "launch":
                self.nodes |= {each["agent"]: each["seat"]["node"] for each in action["agents"]}
            case "start_agent":
                self.nodes[action["agent"]] = action["node"]
            case "record" if action["table"] == "recoveries":
                self.recoveries += len([*rows_of(action)])
