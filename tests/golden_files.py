"""Texts that are compared as a whole with files; `pytest --update-golden` writes them anew."""

from __future__ import annotations

from pathlib import Path


class Golden:
    """The files in tests/golden."""

    def __init__(self, directory: Path, update: bool) -> None:
        self._directory = directory
        self._update = update

    def check(self, name: str, text: str) -> None:
        """Fails when the text is not the file's, or there is no file; --update-golden writes it."""
        path = self._directory / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path}; `pytest --update-golden` writes it"
        assert text == path.read_text(encoding="utf-8")
