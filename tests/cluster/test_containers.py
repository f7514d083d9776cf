"""A run whose coordinator is on a host without torch, and whose agents run in an image without
Slurm, in Charliecloud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc import __version__
from liver_hpc.cluster.launcher import AGENT_MODULE
from tests.cluster.harness import REPOSITORY, SlurmCluster
from tests.cluster.image import PYTHON, make_image
from tests.cluster.slurm_runs import SlurmRun, each_step_once, slurm_run, wait_for
from tests.integration.runs import TINY_MODEL

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]

NO_TORCH = REPOSITORY / "tests" / "integration" / "no_torch"


@pytest.fixture(scope="module")
def image(charliecloud_here: None, run_cluster: SlurmCluster) -> Path:
    made = run_cluster.shared / "image"
    make_image(made)
    return made


def agents(run: SlurmRun) -> list[psutil.Process]:
    """Without the sruns that have started them."""
    begins = [PYTHON, "-P", "-m", AGENT_MODULE]
    return [each for each in run.processes() if each.cmdline()[:4] == begins]


@pytest.fixture
def sections(
    image: Path, run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Of a run file, for a host on which `image` is all that has torch."""
    monkeypatch.setenv("PYTHONPATH", f"{NO_TORCH}:{REPOSITORY}")
    monkeypatch.setenv("USER", "root")  # as a login sets it; ch-run asks for it
    text = {"text": "python-stdlib", "directory": str(run_cluster.shared / "data")}
    return {
        "recipe": "liver_hpc.recipes.gpt:GPT",
        "model": {**TINY_MODEL, "vocab_size": 512},
        "data": {**text, "max_text_bytes": 2**20},
        "workers": {"initial": 1, "max": 2},
    }


@pytest.fixture
def container(image: Path) -> dict[str, Any]:
    """Without --private-tmp all that lies in the host's /tmp would be seen."""
    own_tmp = ["--private-tmp"]
    return {"runtime": "charliecloud", "image": str(image), "python": PYTHON, "options": own_tmp}


def test_a_run_in_an_image_grows_onto_a_second_node(
    run_cluster: SlurmCluster, sections: dict[str, Any], container: dict[str, Any]
) -> None:
    with slurm_run(run_cluster, "contained", 0, sections, container=container) as run:
        run.submit()
        run.wait_workers(2)
        roots = [Path(f"/proc/{agent.pid}/root") for agent in agents(run)]
        assert len(roots) == 2
        for root in roots:
            assert (root / PYTHON.lstrip("/")).is_symlink()
            assert not (root / "usr/bin/srun").exists()
        run.stop()
        run.nothing_is_left()
        records = run.records()
        assert records.attributes["torch"] == "not installed"
        assert [r.target for r in run.attempts("completed")] == ["tp1 pp1 dp2"]
        each_step_once(records)
        assert "derives it" in run.log()


def test_the_doctor_tries_nodes_in_their_image(
    run_cluster: SlurmCluster, sections: dict[str, Any], container: dict[str, Any]
) -> None:
    with slurm_run(run_cluster, "examined", 0, sections, container=container) as run:
        words = ("--nodes", "2", "--partition", "stable", "--json")
        found = run.liver("doctor", "--config", str(run.file), *words, limit_s=150.0)
        results = {one["check"]: one for one in map(json.loads, found.splitlines())}
    assert {name for name, one in results.items() if one["level"] == "FAIL"} == set()
    assert results["gloo"]["level"] == "PASS"
    assert "as on the asking host: liver_hpc" in results["versions"]["found"]


def test_an_image_of_another_release_is_refused_before_a_worker_boots(
    run_cluster: SlurmCluster, image: Path, sections: dict[str, Any], container: dict[str, Any]
) -> None:
    (module,) = image.glob("venv/lib/python*/site-packages/liver_hpc/__init__.py")
    text = module.read_text()
    module.write_text(text.replace(__version__, "0.0.1"))
    try:
        with slurm_run(run_cluster, "older", 0, sections, container=container) as run:
            run.submit()
            wait_for(lambda: run.directory.last_outcome() is not None, 60.0, "the run to fail")
            outcome = run.directory.last_outcome()
            run.nothing_is_left()
    finally:
        module.write_text(text)
    assert outcome is not None
    assert outcome.state == "failed"
    assert f"liver_hpc is 0.0.1 here, and {__version__} for the host that asks" in outcome.reason
    assert not [*(run.directory.path / "logs").glob("worker-*")]
