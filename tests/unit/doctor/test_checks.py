"""Checks in order: lines, skips, and errors that become findings."""

from __future__ import annotations

from liver_hpc.doctor.checks import (
    Check,
    Examination,
    Level,
    Result,
    failed,
    passed,
    skipped,
    warned,
)
from liver_hpc.errors import LiverError


def found(*checks: Check[int]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    Examination(results.__setitem__).run(checks, 0)
    return results


def test_what_a_failed_check_stands_in_the_way_of_is_skipped_to_the_end_of_the_chain() -> None:
    results = found(
        Check("first", lambda _: failed("gone", "bring it")),
        Check("second", lambda _: passed("fine"), ("first",)),
        Check("third", lambda _: passed("fine"), ("second",)),
        Check("other", lambda _: passed("fine")),
    )
    assert results["second"] == skipped("needs the check of first, which failed")
    assert results["third"] == skipped("needs the check of second, which was not made")
    assert results["other"] == passed("fine")


def test_a_warning_stands_in_nobodys_way() -> None:
    results = found(
        Check("first", lambda _: warned("slow", "be patient")),
        Check("second", lambda _: passed("fine"), ("first",)),
    )
    assert results["second"].level is Level.PASS


def test_a_check_that_does_not_apply_stands_in_nobodys_way() -> None:
    results = found(
        Check("first", lambda _: skipped("there is none")),
        Check("second", lambda _: passed("fine"), ("first",)),
    )
    assert results["second"].level is Level.PASS


def test_an_error_is_a_failure_with_the_checks_own_advice() -> None:
    def look(_: int) -> Result:
        raise LiverError("waited 3 s for n2")

    assert found(Check("net", look, advice="plug it in")) == {
        "net": failed("waited 3 s for n2", "plug it in")
    }


def test_a_finding_is_one_line_whatever_was_complained_of() -> None:
    line = failed("cannot\nencode", "start munged").line("munge")
    assert line == "FAIL  munge             cannot encode; do: start munged"
