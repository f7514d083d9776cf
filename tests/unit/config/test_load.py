from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.config.load import absolute_paths, dump_run, load_run, parse_run
from liver_hpc.config.schema import DataSection, EvalSection, RunConfig
from liver_hpc.errors import ConfigError
from tests.unit.config.runs import minimal, write, write_minimal


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_run(path, overrides)
    return str(raised.value)


# ---- reading


def test_minimal_file_takes_defaults(tmp_path: Path) -> None:
    config = load_run(write_minimal(tmp_path))
    assert config.name == "run"
    assert config.train.micro_batch == 1
    assert config.handoff.bucket_bytes == 4 * 2**20
    assert [str(layout) for layout in config.allowed_layouts(2)] == ["tp1 pp1 dp2", "tp2 pp1 dp1"]


def test_one_layout_needs_no_list(tmp_path: Path) -> None:
    config = load_run(write_minimal(tmp_path, layouts={2: {"dp": 2}}))
    assert [str(layout) for layout in config.allowed_layouts(2)] == ["tp1 pp1 dp2"]


def test_number_without_a_point_before_its_exponent(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    path.write_text(
        path.read_text() + "optimizer: {lr: 3e-4, eps: 1e-08}\nmodel: {init_std: 2E-2}\n"
    )
    config = load_run(path)
    assert (config.optimizer.lr, config.optimizer.eps) == (3e-4, 1e-8)
    assert config.model == {"init_std": 0.02}


def test_times_and_what_begins_with_0_are_no_numbers(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    assert "got '4:00:00'" in problem(path, "cluster.timeout_min=4:00:00")
    given = {"time-min": "1:00:00", "reservation": "0123", "mem": 0}
    part = "{name: a, options: {time-min: 1:00:00, reservation: 0123, mem: 0}}"
    config = load_run(path, [f"cluster.slurm.components=[{part}]"])
    assert config.cluster.slurm.components[0].options == given
    assert parse_run(dump_run(config)) == config


def test_an_override_changes_one_place_alone(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    notices = "[{at_step: 1, layout: &a {dp: 2}}, {at_step: 2, layout: *a}]"
    path.write_text(path.read_text() + f"notices: {notices}\n")
    config = load_run(path, ["notices.0.layout.dp=1"])
    assert [notice.layout and notice.layout.dp for notice in config.notices] == [1, 2]


def test_no_such_file(tmp_path: Path) -> None:
    assert problem(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: there is no such file"


def test_directory_in_place_of_a_file(tmp_path: Path) -> None:
    assert "cannot be read" in problem(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- 1\n- 2\n", "wanted keys and values, got list"),
        ("name: a\ntrain: {steps: 1\n", "run.yaml:3: not valid YAML"),
        ("name: a\n\tb: 1\n", "run.yaml:2: not valid YAML"),
        ("name: !!python/object:os.system {}\n", "run.yaml:1: not valid YAML"),
        ("? [1, 2]\n: 3\n", "run.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document"),
        ("name: a\x07\n", "not valid YAML: unacceptable character"),
        pytest.param("a: " + 3000 * "[" + 3000 * "]", "too many", id="deep"),
        ("name: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
        ("name: !!bool abc\n", "run.yaml: not valid YAML: 'abc'"),
        ("name: !!timestamp abc\n", "run.yaml: not valid YAML: "),
        ("name: a\ntrain: {steps: 1}\nname: b\n", ":3: key 'name' is given twice, first in line 1"),
        ("train:\n  steps: 1\n  steps: 2\n", ":3: key 'steps' is given twice, first in line 2"),
        ("layouts: {2: {dp: 2}, 2: {tp: 2}}\n", "run.yaml:1: key 2 is given twice"),
    ],
)  # fmt: skip
def test_text_that_is_no_run_file(tmp_path: Path, text: str, said: str) -> None:
    assert said in problem(write(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    assert "not a UTF-8 text file" in problem(path)


def test_aliases_and_merges_are_not_duplicates(tmp_path: Path) -> None:
    text = """
    .base: &base {steps: 5, global_batch: 4}
    train: {<<: *base, steps: 7}
    """
    said = problem(write(tmp_path, text))
    assert "twice" not in said
    assert ".base: unknown key" in said


def test_alias_to_itself_ends(tmp_path: Path) -> None:
    assert "without an end" in problem(write(tmp_path, "a: &a [*a]\n"))


# ---- what is wrong with a value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("handoff.bucket_byte=4", "unknown key; did you mean 'bucket_bytes'? (valid keys here: "
         "bucket_bytes, digests, direct, keep_groups, memory, overlap, staging_bytes, take_over, "
         "warm_up, warm_up_again)"),
        ("qqq=4", "unknown key (valid keys here: checkpoint, cluster, data, deadlines, eval, "),
        ("layouts.2.0.xq=4", "valid keys here: cp, dp, ep, pp, sequence_parallel, tp, vpp"),
        ("layouts.3.0.tp=3", "--set layouts.3.0.tp=3: layouts.3.0: unknown key (valid keys here: "),
        ("layouts.2.0.ep=4", "layout tp1 pp1 dp2 ep4: ep must divide dp x cp, which is 2"),
        ("handoff.staging_bytes=64MB", "a whole number of bytes, got '64MB'"),
        ("handoff.staging_bytes=6.5", "wanted a whole number of bytes, got 6.5"),
        ("workers.standby=-1", "wanted a number at least 0, got -1"),
        ("handoff.staging_bytes=-1", "wanted a number more than 0, got -1"),
        ("handoff.warm_up=maybe", "wanted true or false, got 'maybe'"),
        ("deadlines.boot_s=30s", "wanted a number of seconds, got '30s'"),
        ("deadlines.boot_s=0", "wanted a number more than 0, got 0"),
        ("deadlines.boot_s=yes", "wanted a number, got true"),
        ("deadlines.step_s=on", "wanted a number, got true"),
        ("optimizer.lr=true", "wanted a number, got true"),
        ("deadlines.heartbeat_s=1e9", "wanted a number at most 1000000, got 1000000000.0"),
        ("tracking.openmetrics.port=yes", "wanted a whole number, got True"),
        ("deadlines.boot_s=.nan", "wanted a finite number, got nan"),
        ("deadlines.boot_s=.inf", "wanted a finite number, got inf"),
        ("data.seed=20250131120000", "wanted a number less than 4294967296, got 20250131120000"),
        ("cluster.slurm.python=foo 'bar", "\"foo 'bar\" is no command line: No closing quotation"),
        ("cluster.slurm.python=~/venv/bin/python", "'~/venv/bin/python': ~ is not expanded here"),
        ("cluster.slurm.python=$VENV/bin/python -s", "'$VENV/bin/python': $ is not expanded here"),
        ("checkpoint.directory=''", "wanted a path, got ''"),
        ("runs_directory=|\n  runs\n", "wanted a path, got 'runs\\n'"),
        ("cluster.slurm.components=[{name: a, options: {clusters: b}}]", "by `sbatch -M CLUSTER`"),
        ("train.steps='10'", "wanted a whole number, got '10'"),
        ("train.steps=true", "wanted a whole number, got True"),
        ("train.steps=", "wanted a whole number, got nothing"),
        ("train.global_batch=-8", "wanted a number more than 0, got -8"),
        ("optimizer.beta1=1", "wanted a number less than 1, got 1"),
        ("schedule.style=cos", "wanted one of 'constant', 'linear', 'cosine' or 'WSD', got 'cos'"),
        ("cluster.kind=pbs", "wanted one of 'auto', 'local' or 'slurm', got 'pbs'"),
        ("name=a/b", "wanted text that matches"),
        ("name=5", "wanted text, got 5"),
        ("train=5", "wanted a section of keys and values, got 5"),
        ("handoff=", "wanted a section of keys and values, got nothing"),
        ("layouts=5", "wanted keys and values, got 5"),
        ("layouts.2.0=5", "wanted a section of keys and values, got 5"),
        ("layouts.x={dp: 1}", "wanted a whole number, got 'x'"),
        ("layouts.0={dp: 1}", "wanted a number more than 0, got 0"),
        ("notices=[{at_step: 1}]", "wanted exactly one of layout, workers, replace; got []"),
        ("notices=[{workers: 1}]", "notices.0.at_step: this key is required"),
        ("data={}", "exactly one of data.prefix, data.blend and data.text must be given"),
        ("data.text=5", "wanted a list or one of 'python-stdlib', got 5"),
        ("workers.initial=5", "workers.initial is 5, more than workers.max 4"),
        ("notices=[{at_step: 1, workers: 4, replace: 0}]", "got ['workers', 'replace']"),
        ("data={prefix: a, text: [b]}", "exactly one of data.prefix, data.blend and data.text"),
        ("optimizer.decoupled_min_lr=1e-5", "decoupled_min_lr wants decoupled_lr"),
        ("train.overlap_param_gather=true", "overlap_param_gather wants overlap_grad_reduce too"),
        ("train.rampup={start: 8, increment: 1, samples: 9}",
         "rampup.start is 8, wanted less than global_batch, 8"),
        ("train.rampup={start: 2, increment: 4, samples: 9}",
         "rampup.increment is 4, which does not divide global_batch - rampup.start = 8 - 2 = 6"),
    ],
)  # fmt: skip
def test_wrong_value_says_what_was_wanted(tmp_path: Path, override: str, said: str) -> None:
    text = problem(write_minimal(tmp_path), override)
    assert said in text
    assert override.partition("=")[0].split(".")[0] in text


def test_error_names_file_line_and_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "train:\n  steps: 5\n  global_batch: two\nworkers:\n  initial: 1\nlayouts: {1: {}}\n",
    )
    assert problem(path).splitlines() == [
        "2 problems",
        f"  {path}:3: train.global_batch: wanted a whole number, got 'two'",
        f"  {path}:4: workers.max: this key is required",
    ]


def test_missing_section_is_named(tmp_path: Path) -> None:
    said = problem(write(tmp_path, "name: a\ntrain: {steps: 1, global_batch: 1}\n"))
    assert "run.yaml: workers: this key is required" in said
    assert "run.yaml: layouts: this key is required" in said


# ---- overrides


def test_override_beats_the_file_and_makes_sections(tmp_path: Path) -> None:
    overrides = [
        "train.steps=99",
        "handoff.bucket_bytes=65536",
        "layouts.2.1.dp=1",
        "layouts.1={dp: 1}",
        "notices=[{at_step: 3, workers: 4}]",
        "notices.0.at_step=4",
        "recipe=a.b:C=D",
        "optimizer.lr=1e-2",
    ]
    config = load_run(write_minimal(tmp_path), overrides)
    assert config.train.steps == 99
    assert config.handoff.bucket_bytes == 65536
    assert config.allowed_layouts(1)[0].workers == 1
    assert config.notices[0].at_step == 4
    assert config.recipe == "a.b:C=D"
    assert config.optimizer.lr == 0.01


def test_empty_override_is_null(tmp_path: Path) -> None:
    path = write_minimal(tmp_path, schedule={"decay_steps": 5})
    assert load_run(path, ["schedule.decay_steps="]).schedule.decay_steps is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "--set train.steps: wanted key.sub=VALUE"),
        ("=5", "--set =5: wanted key.sub=VALUE"),
        ("train..steps=5", "--set train..steps=5: wanted key.sub=VALUE"),
        ("train.steps=[1", "--set train.steps=[1: '[1'"),
        ("train.steps=1\nb: 2", "wanted one YAML value"),
        ("train.steps.more=5", "train.steps is 10, not a section"),
        ("layouts.2.7.tp=5", "layouts.2 is a list of 2, without 7"),
        ("layouts.2.x.tp=5", "layouts.2 is a list of 2, without 'x'"),
    ],
)
def test_override_that_does_not_fit(tmp_path: Path, override: str, said: str) -> None:
    assert said in problem(write_minimal(tmp_path), override)


def test_error_names_the_override_and_not_the_file(tmp_path: Path) -> None:
    said = problem(write_minimal(tmp_path), "handoff={bucket_bytes: 0}")
    assert said == (
        "--set handoff={bucket_bytes: 0}: handoff.bucket_bytes: wanted a number more than 0, got 0"
    )


# ---- writing

names = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda name: name[0] not in "._-")
counts = st.integers(1, 2**40)
positive = st.floats(min_value=1e-12, max_value=1e12)
seconds = st.floats(min_value=1e-12, max_value=1e6)
layouts = st.fixed_dictionaries({}, optional={a: st.integers(1, 8) for a in ("tp", "pp", "dp")})
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
runs = st.fixed_dictionaries(
    {
        "name": names,
        "runs_directory": st.text("abc/. é", min_size=1).map(Path),
        "model": st.dictionaries(st.text(max_size=5), values, max_size=3),
        "train": st.fixed_dictionaries({"steps": counts, "global_batch": counts}),
        "workers": st.just({"initial": 1, "max": 8}),
        "layouts": st.dictionaries(st.integers(1, 8), st.lists(layouts, max_size=3), max_size=3),
        "notices": st.lists(
            st.builds(lambda step, count: {"at_step": step, "workers": count}, counts, counts),
            max_size=2,
        ),
        "deadlines": st.fixed_dictionaries({}, optional={"boot_s": seconds, "exit_s": seconds}),
        "optimizer": st.fixed_dictionaries({"lr": positive}),
        "data": st.none() | st.lists(st.text(max_size=9)).map(lambda files: {"text": files}),
    }
)


@settings(max_examples=50)
@given(runs)
def test_what_was_written_reads_back_equal(values: dict[str, object]) -> None:
    config = RunConfig.model_validate(values)
    assert parse_run(dump_run(config)) == config


@pytest.mark.parametrize(("reserve", "known"), [(16 * 2**20, True), (1, False)])
def test_a_run_of_before_is_read_that_names_what_is_constant_now(
    reserve: int, known: bool, tmp_path: Path
) -> None:
    """The journal leaves so much of the disk to others, which was a key that nobody had to give."""
    path = write_minimal(tmp_path)
    path.write_text(f"{path.read_text()}metrics: {{reserve_bytes: {reserve}}}\n")
    if known:
        assert parse_run(dump_run(load_run(path))) == load_run(path)
    else:
        with pytest.raises(ConfigError, match="metrics: unknown key"):
            load_run(path)


def test_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = absolute_paths(minimal(data={"text": ["a.txt", "/b.txt", "~/*.md"]}))
    assert config.runs_directory == tmp_path / "runs"
    assert config.data is not None
    assert config.data.directory == tmp_path / "data"
    assert config.data.text == [str(tmp_path / "a.txt"), "/b.txt", "/home/me/*.md"]
    with_prefix = absolute_paths(minimal(data={"prefix": "corpus"}))
    assert with_prefix.data is not None
    assert with_prefix.data.prefix == tmp_path / "corpus"


# ---- evaluation and shares


def test_which_batches_an_evaluation_takes() -> None:
    validation = EvalSection(every_steps=10, steps=3)
    found = {step: list(validation.batches_after(step)) for step in (0, 5, 10, 11, 20)}
    assert found == {0: [], 5: [], 10: [0, 1, 2], 11: [], 20: [3, 4, 5]}


def test_workers_are_waited_for_longer_where_they_evaluate() -> None:
    plain, evaluated = minimal(), minimal(eval={"every_steps": 10, "steps": 3})
    assert plain.limits == plain.deadlines
    more_s = evaluated.limits.boundary_s - plain.limits.boundary_s
    assert more_s == plain.deadlines.evaluation_s


def test_workers_are_waited_for_longer_where_their_node_is_checked_first() -> None:
    checked = minimal(cluster={"health_check": "true"})
    assert checked.limits.boot_s == checked.deadlines.boot_s + checked.deadlines.health_s


@pytest.mark.parametrize(
    ("split", "shares"),
    [(None, (1, 0, 0)), ("1", (1, 0, 0)), ("969,30,1", (969, 30, 1)), ("0.9,.1", None),
     ("0,1", None), ("9,1,1,1", None), ("90.5,9.5", (90.5, 9.5, 0))],
)  # fmt: skip
def test_shares_of_the_data(split: str | None, shares: tuple[float, ...] | None) -> None:
    if shares is None:
        with pytest.raises(ValueError, match=r"split"):
            DataSection(prefix=Path("p"), split=split)
    else:
        assert DataSection(prefix=Path("p"), split=split).shares == shares


def test_paths_of_a_blend_become_absolute() -> None:
    config = absolute_paths(minimal(data={"blend": [{"prefix": "some/where", "weight": 2}]}))
    assert config.data is not None
    assert config.data.blend is not None
    assert config.data.blend[0].prefix == Path.cwd() / "some/where"
