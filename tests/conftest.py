"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import tests.megatron_first  # noqa: F401
from tests.golden_files import Golden

# How long an example takes says nothing on a machine that is shared.
settings.register_profile("liver", deadline=None)
settings.load_profile("liver")

# Where the tests run in the background SIGINT may be ignored, by nohup SIGHUP is: child processes
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REPOSITORY = Path(__file__).parent.parent

# Files that take longest, of which none is to be left to run alone at the end.
LONG_FILES = (
    "integration/test_matrix.py",
    "unit/run/test_mutations.py",
    "unit/run/test_matrix.py",
    "integration/test_elastic_runs.py",
    "integration/test_checkpoint.py",
    "integration/test_megatron_lm.py",
    "cluster/test_job_ends.py",
    "integration/test_operated_runs.py",
    "cluster/test_runs.py",
)


def pytest_collection_finish() -> None:
    """No later collection walks what all these modules have brought: that takes up to a second."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in an order in which the machine always has work: the longest; then those of the
    cluster, which mostly wait, evenly among those that compute; then those of unit tests."""
    tests = Path(__file__).parent
    place = {tests / name: (0, float(number)) for number, name in enumerate(LONG_FILES)}
    others = [path for path in dict.fromkeys(item.path for item in items) if path not in place]
    for group in (["cluster"], ["benchmarks", "integration"]):
        paths = [path for path in others if path.relative_to(tests).parts[0] in group]
        place |= {path: (1, (number + 0.5) / len(paths)) for number, path in enumerate(paths)}
    items.sort(key=lambda item: place.get(item.path, (2, 0.0)))


class ByWhatIsShared(LoadFileScheduling):
    """A process runs a whole file, as its tests share what takes long to make; of the longest file
    a phase."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, test = nodeid.partition("::")
        if path != f"tests/{LONG_FILES[0]}":
            return path
        return path + test.partition("[")[2].partition(",")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByWhatIsShared | None:
    return ByWhatIsShared(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing"
    )


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Golden:
    """What tests/golden holds."""
    return Golden(REPOSITORY / "tests" / "golden", pytestconfig.getoption("--update-golden"))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, str, str], None]:
    """Changes one line of the real code."""

    def change(owner: Any, name: str, line: str, instead: str) -> None:
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(line) == 1, f"{name} has not once {line!r}"
        made: dict[str, Any] = {}
        exec(source.replace(line, instead), function.__globals__, made)
        monkeypatch.setattr(owner, name, made[name])

    return change


@pytest.fixture
def repository() -> Path:
    """The repository's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """A checkout of Megatron-LM: the one that MEGATRON_LM names, else a small stand-in."""
    return Path(os.environ.get("MEGATRON_LM") or REPOSITORY / "tests" / "standin_megatron_lm")


@pytest.fixture
def configs(repository: Path) -> Path:
    """The run files that the repository ships."""
    return repository / "configs"
