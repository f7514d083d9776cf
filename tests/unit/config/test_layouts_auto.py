"""`layouts: auto` from the file to the resolved run."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cli import submission
from liver_hpc.cli.dry_run import describe_run
from liver_hpc.cli.submission import checked_run
from liver_hpc.config.load import dump_run, load_run, parse_run
from liver_hpc.errors import ConfigError
from tests.unit.by_rule import by_rule
from tests.unit.config.runs import minimal, write_minimal


def test_auto_reads_and_writes_back_as_it_is(tmp_path: Path) -> None:
    config = load_run(write_minimal(tmp_path, layouts="auto"))
    assert config.layouts == "auto"
    assert parse_run(dump_run(config)) == config


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ("all", ["layouts: wanted one of 'auto', got 'all'"]),
        ([2], ["layouts: wanted keys and values, got [2]"]),
        ({2: {"tp": "x"}}, ["layouts.2.tp: wanted a whole number, got 'x'"]),
        (
            {2: [{"ep": 2, "xp": 1}], 0: {}},
            ["layouts.2.0.xp: unknown key (valid keys here: cp, ", "layouts.0"],
        ),
        (
            {2: [{"dp": 2, "ep": 4}]},
            ["layouts.2.0: layout tp1 pp1 dp2 ep4: ep must divide dp x cp, which is 2"],
        ),
    ],
)
def test_neither_auto_nor_a_table(tmp_path: Path, layouts: object, said: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run(write_minimal(tmp_path, layouts=layouts))
    text = str(raised.value)
    assert all(part in text for part in said), text
    assert text.count(": layouts") == len(said)


def test_override(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    assert load_run(path, ["layouts=auto"]).layouts == "auto"
    with pytest.raises(ConfigError, match="layouts is 'auto', not a section"):
        load_run(write_minimal(tmp_path, layouts="auto"), ["layouts.2.0.tp=2"])


def test_nobody_takes_auto_for_a_table() -> None:
    config = minimal(layouts="auto")
    with pytest.raises(ConfigError, match="layouts is 'auto'"):
        config.allowed_layouts(2)
    with pytest.raises(ConfigError, match="layouts is 'auto'"):
        assert config.worker_counts


def test_submit_writes_the_table_out(tmp_path: Path) -> None:
    notices = [{"at_step": 3, "workers": 4}]
    config, recipe = checked_run(minimal(layouts="auto", notices=notices))
    assert config.worker_counts == [1, 2, 3, 4]
    assert config.policy.layout == "auto"
    assert recipe.config == config
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(config), encoding="utf-8")
    assert load_run(path) == config
    text = describe_run(config, recipe)
    assert "#   4        tp1 pp1 dp4" in text


@pytest.fixture
def spec_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "derive_spec", by_rule)


@pytest.mark.usefixtures("spec_by_rule")
def test_no_layout_of_the_initial_workers() -> None:
    run = minimal(
        layouts="auto",
        workers={"initial": 5, "max": 5},
        train={"steps": 1, "global_batch": 4},
    )
    with pytest.raises(ConfigError, match=r"^layouts: auto finds nothing for workers\.initial = 5"):
        checked_run(run)


@pytest.mark.usefixtures("spec_by_rule")
def test_memory_that_does_not_even_hold_the_staging() -> None:
    staging = minimal().handoff.staging_bytes
    with pytest.raises(ConfigError, match=r"more than policy\.memory_bytes"):
        checked_run(minimal(layouts="auto", policy={"memory_bytes": staging}))
