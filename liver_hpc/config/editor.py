"""The JSON schema of run files, by which editors complete and check them. `make docs` writes it,
with what configs/reference.yaml says of each key."""

from __future__ import annotations

from pathlib import Path

SCHEMA_PATH = Path(__file__).with_name("run-file.schema.json")


def schema_text() -> str:
    return SCHEMA_PATH.read_text(encoding="utf-8")
