"""Whatever a test leaves running is ended before the next one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.host.marks import kill_marked
from liver_hpc.report.store import RunRecords, read_run
from tests.integration.agents import TEST_MARK, Run, wait_for
from tests.integration.browser import NoBrowser, find_browser
from tests.integration.leftovers import no_abandoned_files
from tests.integration.once import derived_once, made_once
from tests.integration.runs import finish, kill_started, run_config, start

ENGINE = Path(sys.prefix) / "transformer-engine"
ENGINE_ON_A_CPU = Path(__file__).parents[1] / "engine"


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    kill_started()


@pytest.fixture(scope="module", autouse=True)
def specs_derived_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with derived_once(tmp_path_factory):
        yield


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """The training of `run_config` as it stands, on dp2 and without any event, longer than any
    other run of it."""
    with made_once(tmp_path_factory, "quiet") as path:
        if not path.exists():
            run = start(run_config(path.with_suffix(".runs"), steps=330))
            finish(run)
            path.symlink_to(run.path)
        return read_run(path)


@pytest.fixture
def unhurried_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take long enough to leave the machine time for joiners that boot beside them."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.4")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started from here on finds Transformer Engine, on a CPU."""
    if not ENGINE.is_dir() and not os.environ.get("CI"):
        pytest.skip(f"no {ENGINE}, where `make install` puts it")
    path = [str(ENGINE_ON_A_CPU), str(ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("NVTE_MASKED_SOFTMAX_FUSION", "0")  # its softmax by torch


@pytest.fixture(scope="module")
def device() -> Any:
    """The device of this process as one worker, or one after the other, of worlds that never
    communicate."""
    from liver_hpc.world.device import open_device

    # Before megatron is imported, as in a worker.
    opened = open_device(0)
    from liver_hpc.world import megatron

    megatron.prepare_process(seed=1)
    gc.freeze()  # every closed world collects; the imports need not be walked each time
    return opened


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Whatever the test did: once closed, nothing of it lives, and no file of MPI's is left."""
    mark = str(tmp_path)
    monkeypatch.setenv(TEST_MARK, mark)
    made = Run(tmp_path, mark)
    try:
        with no_abandoned_files():
            yield made
            for launcher in made.launchers:
                launcher.close()
            made.rendezvous.close()
            made.coordinator.close()
            wait_for(lambda: not made.alive(), "all processes to end", 5.0)
    finally:
        made.rendezvous.close()
        made.coordinator.close()
        kill_marked(TEST_MARK, mark, 5.0)


@pytest.fixture(scope="session")
def browser() -> str:
    """Under CI=true a missing one is installed, and one that cannot be is a failure."""
    must = os.environ.get("CI") == "true"
    try:
        return find_browser(install=must)
    except NoBrowser as reason:
        if must:
            pytest.fail(f"pages must be seen in a browser under CI: {reason}")
        pytest.skip(f"NO PAGE WAS SEEN IN A BROWSER: {reason}")
