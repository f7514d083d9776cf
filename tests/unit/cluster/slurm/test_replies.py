"""squeue's answers in JSON. The golden ones were written from the schema that Slurm documents
(data_parser v0.0.39 and v0.0.40), not recorded: there was no such Slurm to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cluster.slurm.replies import JobInfo, jobs_of_json, speaks_json
from liver_hpc.errors import LiverError

GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"
END_S = 1795264860.0


def hostnames(nodes: str) -> tuple[str, ...]:
    return {"": (), "n1": ("n1",), "n[2-3]": ("n2", "n3")}[nodes]


def answer(release: str) -> dict[str, JobInfo]:
    return jobs_of_json((GOLDEN / f"squeue-{release}.json").read_text(), hostnames)


def test_an_answer_of_23_02_says_what_lines_say() -> None:
    assert answer("23.02") == {
        "1": JobInfo("1", "1", "RUNNING", "None", ("n1",), END_S),
        "2": JobInfo("2", "1", "RUNNING", "None", ("n2", "n3"), END_S),
        "7": JobInfo("7", None, "PENDING", "Resources", (), None),
    }


def test_later_states_are_lists_and_numbers_may_be_unset_or_without_bounds() -> None:
    assert answer("23.11") == {
        "1": JobInfo("1", "1", "RUNNING", "None", ("n1",), None),
        "2": JobInfo("2", "1", "COMPLETING", "None", ("n2", "n3"), END_S),
        "7": JobInfo("7", None, "PENDING", "Resources", (), None),
    }


@pytest.mark.parametrize("printed", ["", "slurm_load_jobs error", "{}", '{"jobs": [{}]}', "[1]"])
def test_what_is_no_answer_is_refused(printed: str) -> None:
    with pytest.raises(LiverError, match="squeue --json: wanted jobs, got"):
        jobs_of_json(printed, hostnames)


def test_which_releases_are_asked_for_json() -> None:
    for version in ("slurm 23.02.0", "slurm 23.11.4", "slurm 24.05.1", "slurm 25.11.0-rc1"):
        assert speaks_json(version)
    for version in ("slurm 22.05.8", "slurm-wlm 21.08.5", "slurm 23.01.9", "", "slurm"):
        assert not speaks_json(version)
