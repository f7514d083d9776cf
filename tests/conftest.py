"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says nothing on a machine that is shared.
settings.register_profile("liver", deadline=None)
settings.load_profile("liver")

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def repository() -> Path:
    """The repository's root."""
    return REPOSITORY


@pytest.fixture
def configs(repository: Path) -> Path:
    """The run files that the repository ships."""
    return repository / "configs"
