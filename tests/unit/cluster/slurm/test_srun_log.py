"""srun's words, as Slurm 22.05.8 printed them."""

from __future__ import annotations

from liver_hpc.cluster.launcher import KILLED
from liver_hpc.cluster.slurm.srun_log import (
    created_no_step,
    found_no_controller,
    is_lost,
    last_error,
    task_ends,
    unnamed_ends,
)

STEP = """\
srun: jobid 1: nodes(5):`n[1-5]', cpu counts: 4(x5)
srun: launch/slurm: launch_p_step_launch: CpuBindType=none
srun: launching StepId=1.0 on host n1, 1 tasks: 0
srun: launch/slurm: _task_start: Node n2, 1 tasks started
srun: launch/slurm: _task_finish: Received task exit notification for 1 task of StepId=1.0 \
(status=0x5700).
srun: error: n2: task 1: Exited with exit code 87
srun: error: n3: task 2: Killed
srun: launch/slurm: _task_finish: n1: task 0: Completed
srun: error: Node failure on n5
"""


def test_each_task_that_has_ended_is_found() -> None:
    assert dict(task_ends(STEP)) == {"n2": 87, "n3": 137, "n1": 0, "n5": KILLED}
    assert is_lost(STEP)


def test_several_tasks_and_other_ways_to_end() -> None:
    said = "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n"
    said += (
        "srun: error: n3: task 2: Segmentation fault (core dumped)\nsrun: n4: task 3: Completed\n"
    )
    assert list(task_ends(said)) == [("n[1-2]", 1), ("n3", 139), ("n4", 0)]


def test_what_a_task_prints_is_not_sruns_word() -> None:
    said = "n1: task 0: Completed\nagent: srun: error: n1: task 0: Killed\n"
    assert list(task_ends(said)) == []
    assert not is_lost("my node failure\n")


def test_why_an_srun_never_began() -> None:
    away = "srun: error: Unable to contact slurm controller (connect failure)\n"
    refused = "srun: error: Unable to create step for job 7: Required node not available\n"
    assert found_no_controller(away)
    # A step that has begun, on all nodes but this one.
    assert not found_no_controller(
        "srun: error: Task launch for StepId=20.0 failed on node n3: Socket timed out on send/recv "
        "operation\nsrun: error: Application launch failed: Socket timed out on send/recv\n"
    )
    assert created_no_step(refused)
    assert last_error(STEP + refused).startswith("Unable to create step for job 7")
    assert last_error("srun: error: n2: task 1: Killed\n") == ""


def test_of_those_that_end_out_of_memory_one_alone_is_named() -> None:
    said = "srun: launch/slurm: _task_finish: Received task exit notification for 1 task of "
    notice = f"{said}StepId=1.0 (status=0x00fd).\n"
    named = "srun: error: n2: task 1: Out Of Memory\n"
    assert unnamed_ends(STEP) == 0
    assert unnamed_ends(notice + named) == 0
    assert unnamed_ends(notice + named + notice + notice) == 2
    assert dict(task_ends(notice + named)) == {"n2": KILLED}
