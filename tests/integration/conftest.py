"""Whatever a test of whole runs leaves running is ended before the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.runs import kill_started


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    kill_started()
