"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from liver_hpc.importing import collector_paused


def test_nothing_is_collected_inside_and_what_was_made_is_not_walked_afterwards() -> None:
    """Also where the imports fail."""
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), collector_paused():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen + len(kept)
    finally:
        gc.unfreeze()
