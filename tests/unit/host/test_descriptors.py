"""How many descriptors a process may have."""

from __future__ import annotations

import resource

import pytest

from liver_hpc.host.descriptors import ENOUGH, raise_descriptor_limit

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, [(4096, 4096)]),
        (1024, 2**20, [(ENOUGH, 2**20)]),
        (1024, UNLIMITED, [(ENOUGH, UNLIMITED)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (UNLIMITED, UNLIMITED, []),
    ],
)
def test_the_soft_limit_is_raised_towards_the_hard_one(
    soft: int, hard: int, wanted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    raise_descriptor_limit()
    assert made == wanted
