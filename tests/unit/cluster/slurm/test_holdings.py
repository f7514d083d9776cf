"""What Slurm's answers and signals mean for the nodes that are held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liver_hpc.cluster.slurm.holdings import GIVEN_BACK, Allocation, Holdings
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.errors import LiverError
from liver_hpc.run.events import EndNear, NodeGone, NodeGranted, NodeWarned, PoolEvent

LIMIT_S = 10_000.0
KILL_S = 5.0
GRACE_S = 6.0

MAIN = JobInfo("1", "1", "RUNNING", "None", ("n1",), LIMIT_S)
EXTRA = JobInfo("2", "1", "RUNNING", "None", ("n2", "n3"), LIMIT_S)
BURST = JobInfo("9", None, "RUNNING", "None", ("n4", "n5"), LIMIT_S)


@pytest.fixture
def held() -> Holdings:
    """main: n1. extra: n2, n3, preemptible. burst-9: n4, n5."""
    holdings = Holdings(end_window_s=100.0, kill_s=KILL_S, grace_s={"preempt": GRACE_S})
    main = Allocation("main", "1", ("n1",), 2, ("1", 0), own=True)
    extra = Allocation("extra", "2", ("n2", "n3"), 2, ("1", 1), partition="preempt")
    burst = Allocation("burst-9", "9", ("n4", "n5"), 2, partition="preempt", burst=True)
    for allocation in (main, extra, burst):
        allocation.ends_s = LIMIT_S
        holdings.enter(allocation)
    return holdings


def observe(held: Holdings, *jobs: JobInfo, now_s: float = 1_000.0) -> list[PoolEvent]:
    """An answer in which the jobs that are not given are as they were."""
    answer = {job.job_id: job for job in (MAIN, EXTRA, BURST)}
    return held.observe({**answer, **{job.job_id: job for job in jobs}}, now_s)


def signalled(
    held: Holdings, node: str, signal: str, at_s: float, info: JobInfo | None
) -> list[PoolEvent]:
    """A signal, and an answer in which there is this job, or none any more."""
    return held.signalled(node, signal, at_s, {} if info is None else {info.job_id: info})


def warned(nodes: str, reason: str, at_s: float, deadline_s: float | None) -> list[PoolEvent]:
    return [NodeWarned(node, reason, at_s, deadline_s) for node in nodes.split()]


def test_grants_say_what_can_be_taken_unreachable() -> None:
    holdings = Holdings(100.0, KILL_S)
    burst = Allocation("burst-9", "9", ("n4",), 2, burst=True)
    (event,) = holdings.enter(burst)
    assert isinstance(event, NodeGranted)
    assert (event.node.preemptible, event.node.burst, event.node.slots) == (True, True, 2)
    assert holdings.use("n4") is burst
    with pytest.raises(LiverError, match=r"'n9' is not held .*nodes are n4"):
        holdings.use("n9")


def test_as_long_as_nothing_changes_there_is_nothing_to_tell(held: Holdings) -> None:
    assert observe(held) == []
    assert observe(held, now_s=5_000.0) == []


def test_preemption_is_a_limit_that_was_moved_into_the_grace_time(held: Holdings) -> None:
    taken = replace(BURST, ends_s=1_006.0)
    assert signalled(held, "n5", "SIGTERM", 1_000.0, taken) == warned(
        "n4 n5", "preempted", 1_000.0, 1_006.0
    )
    # its other agents, and the poll, say nothing new
    assert signalled(held, "n4", "SIGTERM", 1_000.2, taken) == []
    assert observe(held, taken, now_s=1_001.0) == []
    # SIGTERM again at the end of the grace time: now the kill is near
    assert signalled(held, "n5", "SIGTERM", 1_008.0, taken) == warned(
        "n4 n5", "preempted", 1_000.0, 1_008.0 + KILL_S
    )


def test_preemption_is_seen_without_a_signal(held: Holdings) -> None:
    assert observe(held, replace(EXTRA, ends_s=1_005.0)) == warned(
        "n2 n3", "preempted", 1_000.0, 1_005.0
    )


def test_a_shorter_time_limit_is_no_preemption(held: Holdings) -> None:
    assert observe(held, replace(BURST, ends_s=5_000.0)) == []
    assert observe(held, replace(BURST, ends_s=1_090.0)) == warned(
        "n4 n5", "time limit", 1_000.0, 1_090.0
    )


def test_an_extended_time_limit_withdraws_the_warning(held: Holdings) -> None:
    observe(held, now_s=LIMIT_S - 50.0)
    events = observe(held, replace(BURST, ends_s=LIMIT_S + 900.0), now_s=LIMIT_S - 40.0)
    assert [e.node.name for e in events if isinstance(e, NodeGranted)] == ["n4", "n5"]


def test_the_own_end_is_told_once_and_before_the_others(held: Holdings) -> None:
    now_s = LIMIT_S - 99.0
    first, *others = observe(held, now_s=now_s)
    assert first == EndNear("time limit", now_s, LIMIT_S)
    assert others == warned("n2 n3 n4 n5", "time limit", now_s, LIMIT_S)
    assert observe(held, now_s=now_s + 10.0) == []


def test_a_user_signal_announces_a_limit_or_a_preemption(held: Holdings) -> None:
    assert signalled(held, "n2", "SIGUSR1", 9_950.0, EXTRA) == warned(
        "n2 n3", "time limit", 9_950.0, LIMIT_S
    )
    taken = replace(BURST, ends_s=1_006.0)
    assert signalled(held, "n4", "SIGUSR1", 1_000.0, taken) == warned(
        "n4 n5", "preempted", 1_000.0, 1_006.0
    )


@pytest.mark.parametrize("info", [None, replace(EXTRA, state="COMPLETING")])
def test_a_job_that_ends_at_once_is_cancelled(held: Holdings, info: JobInfo | None) -> None:
    assert signalled(held, "n2", "SIGTERM", 1_000.0, info) == warned(
        "n2 n3", "cancelled", 1_000.0, 1_000.0 + KILL_S
    )


@pytest.mark.parametrize("info", [None, replace(BURST, state="COMPLETING"), BURST])
def test_a_signal_that_is_explained_after_its_job_was_given_back_is_no_news(
    held: Holdings, info: JobInfo | None
) -> None:
    """The poll saw the preemption first, and nothing held the run there."""
    taken = replace(BURST, ends_s=1_006.0)
    assert observe(held, taken) == warned("n4 n5", "preempted", 1_000.0, 1_006.0)
    held.give_back("n4")
    held.give_back("n5")
    assert signalled(held, "n4", "SIGTERM", 1_000.1, info) == []


def test_a_step_that_is_cancelled_alone_costs_its_node_alone(held: Holdings) -> None:
    assert signalled(held, "n2", "SIGTERM", 1_000.0, EXTRA) == warned(
        "n2", "cancelled", 1_000.0, 1_000.0 + KILL_S
    )


def test_without_an_answer_the_worst_is_assumed_and_corrected_later(held: Holdings) -> None:
    assert held.signalled("n4", "SIGTERM", 1_000.0, None) == warned(
        "n4 n5", "preempted", 1_000.0, 1_000.0 + GRACE_S
    )
    corrected = observe(held, replace(BURST, ends_s=1_005.0), now_s=1_003.0)
    assert corrected == warned("n4 n5", "preempted", 1_000.0, 1_005.0)
    assert held.signalled("n9", "SIGTERM", 1_000.0, None) == []


def with_grace(grace_s: float) -> Holdings:
    """Two burst nodes, in a partition that gives so much time before it preempts."""
    held = Holdings(end_window_s=100.0, kill_s=30.0, grace_s={"preempt": grace_s})
    burst = Allocation("burst-9", "9", ("n4", "n5"), 2, partition="preempt", burst=True)
    burst.ends_s = LIMIT_S
    held.enter(burst)
    return held


def test_what_was_taken_for_a_preemption_is_corrected_where_the_job_is_cancelled() -> None:
    held = with_grace(300.0)
    assert held.signalled("n4", "SIGTERM", 1_000.0, None) == warned(
        "n4 n5", "preempted", 1_000.0, 1_300.0
    )
    ending = {"9": replace(BURST, state="COMPLETING")}
    assert held.observe(ending, 1_005.0) == warned("n4 n5", "cancelled", 1_005.0, 1_035.0)
    assert held.observe(ending, 1_010.0) == []


def test_what_was_taken_for_a_cancelled_step_is_corrected_where_a_qos_gives_grace() -> None:
    """With preempt/qos each partition may show the cluster's PreemptMode, and no grace time."""
    held = with_grace(0.0)
    assert held.signalled("n4", "SIGTERM", 1_000.0, None) == warned(
        "n4", "cancelled", 1_000.0, 1_030.0
    )
    assert held.observe({"9": BURST}, 1_003.0) == []  # it was asked before
    taken = {"9": replace(BURST, ends_s=1_300.0)}
    assert held.observe(taken, 1_005.0) == warned("n4 n5", "preempted", 1_005.0, 1_300.0)
    assert held.observe(taken, 1_250.0) == []


def test_a_limit_that_is_shortened_long_after_a_guess_is_no_preemption(held: Holdings) -> None:
    held.signalled("n4", "SIGTERM", 1_000.0, None)
    assert observe(held, now_s=1_070.0) == []
    assert observe(held, replace(BURST, ends_s=5_000.0), now_s=1_075.0) == []


def test_a_burst_job_that_slurm_has_queued_again_goes_back(held: Holdings) -> None:
    """It would come with other nodes, one day, and be kept for nothing."""
    queued = replace(BURST, state="PENDING", reason="launch failed requeued held", nodes=())
    assert observe(held, queued) == []
    (burst,) = held.returning()
    assert (burst.job, burst.returning) == ("9", "Slurm has queued it again")


def test_completing_is_a_warning_and_absence_the_end(held: Holdings) -> None:
    assert observe(held, replace(EXTRA, state="COMPLETING")) == warned(
        "n2 n3", "cancelled", 1_000.0, 1_000.0 + KILL_S
    )
    gone = held.observe({"1": MAIN, "9": BURST}, 1_005.0)
    assert gone == [NodeGone(n, "job 2 has ended (cancelled)") for n in ("n2", "n3")]
    assert held.node_names() == ["n1", "n4", "n5"]


def test_whoever_ends_the_own_job_tells_the_coordinator_itself(held: Holdings) -> None:
    assert observe(held, replace(MAIN, state="COMPLETING")) == []
    assert signalled(held, "n1", "SIGTERM", 1_000.0, None) == []


def test_nodes_that_fall_out_of_a_job_are_gone(held: Holdings) -> None:
    assert observe(held, replace(BURST, nodes=("n4",))) == [
        NodeGone("n5", "taken out of its allocation")
    ]
    assert held.observe_nodes({"n2": "down*", "n3": "allocated"}, 1_000.0) == [
        NodeGone("n2", "Slurm says down*")
    ]


def test_a_job_of_which_no_nodes_are_told_keeps_them_until_it_is_over(held: Holdings) -> None:
    assert observe(held, replace(BURST, nodes=())) == []
    assert observe(held, replace(BURST, nodes=(), state="NODE_FAIL")) == [
        NodeGone(node, "job 9 has ended: NODE_FAIL") for node in ("n4", "n5")
    ]


def test_a_drain_is_told_once_and_never_beats_a_deadline(held: Holdings) -> None:
    drained = {"n2": "allocated+drain", "n4": "idle"}
    assert held.observe_nodes(drained, 1_000.0) == warned("n2", "drained", 1_000.0, None)
    assert held.observe_nodes(drained, 1_010.0) == []
    taken = replace(EXTRA, ends_s=1_026.0)
    told = observe(held, taken, now_s=1_020.0)
    assert told == warned("n2 n3", "preempted", 1_020.0, 1_026.0)
    assert held.observe_nodes(drained, 1_021.0) == []
    assert held.observe_nodes({"n2": "allocated"}, 1_022.0) == []  # it is still preempted


def test_a_node_that_is_drained_no_more_is_as_new(held: Holdings) -> None:
    """Also where it was given back: it keeps its allocation, whose other nodes are given back."""
    held.observe_nodes({"n4": "idle+drain"}, 1_000.0)
    held.give_back("n4")
    (granted,) = held.observe_nodes({"n4": "idle"}, 1_010.0)
    assert isinstance(granted, NodeGranted)
    held.give_back("n5")
    assert held.returning() == []


@pytest.mark.parametrize("state", ["allocated+fail", "failing", "allocated+drain+power_down"])
def test_a_node_whose_jobs_go_on_is_left_live(held: Holdings, state: str) -> None:
    assert held.observe_nodes({"n2": state}, 1_000.0) == warned("n2", "drained", 1_000.0, None)


def test_a_node_that_is_switched_off_once_its_jobs_have_ended_stays(held: Holdings) -> None:
    """With PowerDownOnIdle, as in Google's Cluster Toolkit by default, that is each node of a job
    from its start on."""
    assert held.observe_nodes({"n2": "allocated+cloud+power_down"}, 1_000.0) == []


@pytest.mark.parametrize("state", ["down*", "powering_down", "powered_down"])
def test_a_node_without_jobs_is_gone(held: Holdings, state: str) -> None:
    assert held.observe_nodes({"n2": state}, 1.0) == [NodeGone("n2", f"Slurm says {state}")]


def test_a_burst_job_goes_back_when_the_one_node_in_use_goes_down(held: Holdings) -> None:
    held.give_back("n4")
    held.observe_nodes({"n5": "down"}, 1_000.0)
    assert [back.job for back in held.returning()] == ["9"]


def test_a_job_in_one_of_several_partitions_has_what_that_grants(held: Holdings) -> None:
    held.learn(KILL_S, {"short": 5.0, "long": 600.0})
    both = Allocation("burst-10", "10", ("n6",), 2, partition="short,long", burst=True)
    both.ends_s = LIMIT_S
    held.enter(both)
    info = JobInfo("10", None, "RUNNING", "None", ("n6",), 1_500.0)
    told = signalled(held, "n6", "SIGTERM", 1_000.0, info)
    assert told == warned("n6", "preempted", 1_000.0, 1_500.0)
    assert both.grace_s == 5.0


def test_an_end_that_comes_nearer_with_a_sigterm_is_a_preemption(held: Holdings) -> None:
    """Its grace time may be that of a QOS."""
    held.learn(KILL_S, {})
    info = replace(BURST, ends_s=1_200.0)
    told = signalled(held, "n4", "SIGTERM", 1_000.0, info)
    assert told == warned("n4 n5", "preempted", 1_000.0, 1_200.0)


@pytest.mark.parametrize("grace_s", [120.0, 300.0])
def test_so_it_is_where_the_nearer_end_is_seen_before_the_sigterm(
    held: Holdings, grace_s: float
) -> None:
    """Slurm moves a job's end, and signals it then."""
    held.learn(KILL_S, {})
    info = replace(BURST, ends_s=1_000.0 + grace_s)
    assert observe(held, info, now_s=1_000.5) == []
    told = signalled(held, "n4", "SIGTERM", 1_000.0, info)
    assert told == warned("n4 n5", "preempted", 1_000.0, 1_000.0 + grace_s)


def test_a_limit_that_somebody_has_shortened_long_ago_is_no_preemption(held: Holdings) -> None:
    held.learn(KILL_S, {})
    info = replace(BURST, ends_s=9_000.0)
    assert observe(held, info) == []
    told = signalled(held, "n4", "SIGTERM", 2_000.0, info)
    assert told == warned("n4", "cancelled", 2_000.0, 2_000.0 + KILL_S)


def test_a_burst_job_goes_back_when_all_its_nodes_are_empty(held: Holdings) -> None:
    held.give_back("n4")
    held.use("n4")  # used again
    held.give_back("n5")
    assert held.returning() == []
    held.give_back("n4")
    assert [(back.job, back.returning) for back in held.returning()] == [("9", GIVEN_BACK)]
    with pytest.raises(LiverError, match="not held"):
        held.use("n4")
    assert held.strike("9", "given back") == [NodeGone(n, "given back") for n in ("n4", "n5")]
    assert "9" not in held.jobs


def test_a_node_that_is_not_well_is_gone_and_its_burst_job_goes_back_with_the_others(
    held: Holdings,
) -> None:
    assert held.reject("n4", "no GPU") == [NodeGone("n4", "no GPU")]
    assert held.reject("n4", "no GPU") == []
    assert held.returning() == []
    with pytest.raises(LiverError, match="'n4' is not held"):
        held.use("n4")
    held.give_back("n5")
    assert [back.job for back in held.returning()] == ["9"]


def test_a_burst_job_of_one_node_that_is_not_well_goes_back_at_once(held: Holdings) -> None:
    held.enter(Allocation("burst-10", "10", ("n6",), 2, partition="preempt", burst=True))
    held.reject("n6", "no GPU")
    assert [back.job for back in held.returning()] == ["10"]
    held.reject("n2", "no GPU")
    assert [back.job for back in held.returning()] == ["10"], "a component is kept"


def test_a_component_goes_back_only_when_slurm_takes_it_anyway(held: Holdings) -> None:
    held.observe_nodes({"n2": "allocated+drain"}, 1_000.0)
    held.give_back("n2")
    held.give_back("n3")
    assert held.returning() == []
    observe(held, replace(EXTRA, ends_s=1_026.0), now_s=1_020.0)
    held.give_back("n3")
    held.give_back("n1")
    assert [back.job for back in held.returning()] == ["2"]


def test_at_the_cap_burst_nodes_have_to_be_left_once(held: Holdings) -> None:
    assert held.spent(1_000.0, 1_600.0) == warned("n4 n5", "node hours", 1_000.0, 1_600.0)
    assert held.spent(1_005.0, 1_605.0) == []


def test_at_the_cap_a_node_that_slurm_drains_is_left_with_the_others(held: Holdings) -> None:
    held.observe_nodes({"n4": "allocated+drain"}, 900.0)
    assert held.spent(1_000.0, 1_600.0) == warned("n4 n5", "node hours", 1_000.0, 1_600.0)
    assert held.spent(1_005.0, 1_605.0) == []
