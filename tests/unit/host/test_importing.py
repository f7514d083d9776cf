"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from liver_hpc.host.importing import collector_paused


def test_nothing_is_collected_inside_and_what_was_made_is_not_walked_afterwards() -> None:
    frozen, kept = gc.get_freeze_count(), []
    try:
        with collector_paused():
            assert not gc.isenabled()
            kept += [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen + len(kept)
    finally:
        gc.unfreeze()


def test_the_collector_goes_on_where_an_import_fails() -> None:
    def imports() -> None:
        with collector_paused():
            raise ImportError

    with pytest.raises(ImportError):
        imports()
    assert gc.isenabled()
    gc.unfreeze()
