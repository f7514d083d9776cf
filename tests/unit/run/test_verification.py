"""The comparison of all copies of the state beside steps."""

from __future__ import annotations

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.messages import ClassDigest, Verified
from liver_hpc.run.verification import Verification

DP2 = RankMap(Layout(1, 1, 2), (4, 7))


def told(worker: int, value: int, step: int = 10) -> Verified:
    digest = ClassDigest(
        kind="parameter", tp_replicated=True, multi_stage=False, value=f"{value:016x}"
    )
    return Verified(worker=worker, generation=3, step=step, digests=(digest,))


def test_equal_copies_are_nothing_to_tell() -> None:
    verification = Verification()
    assert verification.tell(told(4, 1), DP2) == ""
    assert verification.tell(told(7, 1), DP2) == ""


def test_a_copy_that_differs_is_named_once_all_have_told() -> None:
    verification = Verification()
    assert verification.tell(told(4, 1), DP2) == ""
    assert "workers [7]" in verification.tell(told(7, 2), DP2)


def test_digests_of_different_steps_are_never_compared() -> None:
    verification = Verification()
    assert verification.tell(told(4, 1), DP2) == ""
    assert verification.tell(told(7, 2, step=20), DP2) == ""
    assert verification.tell(told(4, 2, step=20), DP2) == ""
