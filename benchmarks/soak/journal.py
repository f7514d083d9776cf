"""What the benchmark learns of the run while it goes on, from what the journal gains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liver_hpc.run.entries import JOURNAL_FILE, JournalReader


class Tail:
    """step: the newest that is done. generation: of the world that did it. whole: steps that this
    world has done. pids: of workers. nodes: of agents."""

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / JOURNAL_FILE
        self._reader = JournalReader(self._path)
        self.step = self.generation = -1
        self.whole = 0
        self.pids: dict[int, int] = {}
        self.nodes: dict[str, str] = {}

    def read(self) -> None:
        """What has come since the last call."""
        while self._path.exists() and (entries := self._reader.more()):
            for entry in entries:
                self._event(entry.event)
                for action in entry.actions:
                    self._action(action)

    def _event(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "step_done":
                if event["generation"] != self.generation:
                    self.whole, self.generation = 0, event["generation"]
                self.step, self.whole = event["step"], self.whole + 1
            case "hello":
                self.pids[int(event["worker"])] = int(event["pid"])

    def _action(self, action: Mapping[str, Any]) -> None:
        match action["type"]:
            case "launch":
                self.nodes |= {each["agent"]: each["seat"]["node"] for each in action["agents"]}
            case "start_agent":
                self.nodes[action["agent"]] = action["node"]
