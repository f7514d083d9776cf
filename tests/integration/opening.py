"""A recipe whose module has a file open that it reads, as some data sets do."""

from __future__ import annotations

from pathlib import Path

from tests.integration.random_tokens import RandomTokenGPT

FILE = Path(__file__).open()  # noqa: SIM115


class OpeningGPT(RandomTokenGPT):
    """Trains as any other."""
