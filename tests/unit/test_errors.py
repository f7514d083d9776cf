"""What is told of an error that is somebody else's."""

from __future__ import annotations

import linecache

import pytest

from liver_hpc.errors import told_of

SCRIPT = """
def wants(heads):
    assert (
        heads % 2
        == 0
    )

def other():
    raise ValueError("of two\\nlines")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What is in a user's file, which is called script.py."""
    lines = SCRIPT.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "script.py", (len(SCRIPT), None, lines, "script.py"))
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(SCRIPT, "script.py", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("other()", "ValueError: of two lines (script.py, line 9)"),
        ("wants(3)", "AssertionError: heads % 2 == 0 (script.py, line 4)"),
    ],
)
def test_an_error_is_told_in_a_line_with_its_place(
    script: dict[str, object], call: str, told: str
) -> None:
    """One that has no words by the statement that raised it."""
    with pytest.raises((ValueError, AssertionError)) as raised:
        eval(call, script)
    assert told_of(raised.value) == told
