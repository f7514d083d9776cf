"""A mistake in the core does not go unnoticed; see `mutations.py`."""

from __future__ import annotations

import pytest

from tests.unit.run.mutations import MUTATIONS, PACKAGE, Mutation, mutated, try_out

mutations = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)


@mutations
def test_there_is_something_to_change(mutation: Mutation) -> None:
    text = (PACKAGE / mutation.file).read_text()
    assert mutated(mutation, text) != text


@pytest.mark.long
@pytest.mark.timeout(700)
@mutations
def test_a_mistake_shows_in_some_schedule(mutation: Mutation) -> None:
    outcome = try_out(mutation)
    assert outcome.schedules > 0, "no schedule shows it"
