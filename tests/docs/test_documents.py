"""What README.md and docs/ show is so: blocks are run or checked, and what they name exists.

The convention: a fence says what it is, and how it is held to that.

    ```sh                  run by bash, in the order of the page; a block that fails, fails the test
    ```sh cluster          needs a Slurm cluster, root or a terminal: not run; each command is one
                           that exists (`liver` and `make` with their arguments, `python -m` with
                           its options)
    ```python              run by itself
    ```yaml                a run file where it has `train`, else keys that a run file may have
    ```json                read
    ```text                what is printed or drawn; not looked at

    ```sh file=run.sh      also written to that file, for later blocks of the page (any language)
    ```python test=PATH    run by that test instead, which names the page

Blocks of a page share one directory with the repository's folders and a checkout of Megatron-LM in
it, and the commands of this environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from liver_hpc.cli.options import new_parser
from liver_hpc.cluster.slurm import burst_jobs, orphaned, run_job, script
from liver_hpc.config.load import parse_run
from liver_hpc.errors import ConfigError
from liver_hpc.layout.batch import batch_fault
from liver_hpc.rendezvous.mpi.network import place_file
from liver_hpc.run import entries, epoch, outcome
from liver_hpc.tracking import main as tracking
from tests.unit.config.runs import MINIMAL

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LANGUAGES = ("sh", "python", "yaml", "json", "text")
FOLDERS = ("benchmarks", "configs", "docs", "liver_hpc", "slurm", "tests")
BLOCK_S = 300.0

OUTSIDE = {
    "cat", "cd", "curl", "export", "git", "pip", "python3", "sacct", "salloc", "sbatch", "scancel",
    "scontrol", "sinfo", "squeue", "srun", "ssh", "tail", "tensorboard", "ulimit",
}  # fmt: skip
"""Commands that are not ours, of which no more is known than that they exist somewhere."""


@dataclass(frozen=True)
class Block:
    """One fenced block; line: that of its opening fence, from 1."""

    page: Path
    line: int
    info: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def needs_cluster(self) -> bool:
        return "cluster" in self.info

    def named(self, key: str) -> str:
        """The value of `key=value` after the language; empty without."""
        return dict(word.split("=", 1) for word in self.info[1:] if "=" in word).get(key, "")


def blocks_in(text: str, page: Path) -> list[Block]:
    found, opened, body = list[Block](), -1, list[str]()
    info: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```") and opened < 0:
            opened, info, body = number, tuple(line.removeprefix("```").split()), []
        elif line.startswith("```"):
            found.append(Block(page, opened, info, "\n".join(body) + "\n"))
            opened = -1
        elif opened >= 0:
            body.append(line)
        else:
            assert "```" not in line, f"{page}:{number}: an indented fence would not be seen"
    assert opened < 0, f"{page}:{opened}: this fence is never closed"
    return found


def prose_of(text: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def breaches(block: Block) -> Iterator[str]:
    """What the convention does not know."""
    if block.language not in LANGUAGES:
        yield f"wanted one of {', '.join(LANGUAGES)} after the fence, got {block.language!r}"
    for word in block.info[1:]:
        if word != "cluster" and word.partition("=")[0] not in ("file", "test"):
            yield f"{word!r} is neither cluster, file=NAME nor test=PATH"


PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def directory(tmp_path: Path, megatron_lm: Path) -> Path:
    """Where the blocks of a page run."""
    (tmp_path / "Megatron-LM").symlink_to(megatron_lm.absolute())
    for name in (*FOLDERS, "Makefile", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@each_page
def test_fences_say_what_they_are(page: Path) -> None:
    blocks = blocks_in(page.read_text(encoding="utf-8"), page)
    assert [f"{b.where}: {problem}" for b in blocks for problem in breaches(b)] == []


LONG = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("experts", "megatron-lm", "own-model")]
"""Their blocks train for minutes, as tests of these subjects do, too."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page in LONG else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_are_so(page: Path, directory: Path) -> None:
    for block in blocks_in(page.read_text(encoding="utf-8"), page):
        if name := block.named("file"):
            (directory / name).write_text(block.text, encoding="utf-8")
        if test := block.named("test"):
            assert page.name in (ROOT / test).read_text(encoding="utf-8"), block.where
        elif block.language == "sh" and block.needs_cluster:
            problems = [p for words in commands_in(block.text) for p in problems_of(words)]
            assert problems == [], block.where
        elif block.language in ("sh", "python"):
            run(block, directory)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            check_run_file(block)


def run(block: Block, directory: Path) -> None:
    words = ["bash", "-euo", "pipefail"] if block.language == "sh" else [sys.executable]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*words, "-c", block.text],
        cwd=directory,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BLOCK_S,
    )
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def check_run_file(block: Block) -> None:
    """Loads it; where it is a part of a run file, over the least that there is."""
    values = yaml.safe_load(block.text)
    if "train" not in values:
        values = {**MINIMAL, **values}
    parse_run(yaml.safe_dump(values), block.where)


def test_the_layouts_on_slurm_of_a_megatron_lm_job_are_told_their_batch() -> None:
    """That of the page's arguments is enough for one machine alone."""
    page = ROOT / "docs" / "how-to" / "megatron-lm.md"
    blocks = blocks_in(page.read_text(encoding="utf-8"), page)
    (args,) = (block.text for block in blocks if block.named("file") == "args.txt")
    (slurm,) = (b.text for b in blocks if b.language == "yaml" and "kind: slurm" in b.text)
    found = re.search(r"--micro-batch-size (\d+)", args), re.search(r"-size (\d+) or more", slurm)
    micro, batch = (int(one[1]) if one else 0 for one in found)
    values = {**MINIMAL, **yaml.safe_load(slurm)}
    for size, faults in ((batch, 0), (batch - micro, 1)):
        values["train"] = {"steps": 1, "global_batch": size, "micro_batch": micro}
        config = parse_run(yaml.safe_dump(values))
        layouts = config.layouts_listed
        assert sum(bool(batch_fault(config.train, layout)) for layout in layouts) == faults


# ---- commands that are not run


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command of a script, without assignments and sudo before it."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split, words = True, list[str]()
        for word in [*lexer, ";"]:
            if not set(word) <= set(";|&()"):
                words.append(word)
                continue
            while words and re.fullmatch(r"\w+=.*|sudo", words[0]):
                words = words[1:]
            if words:
                yield words
            words = []


def problems_of(words: list[str]) -> Iterator[str]:
    """What a command names and is not there."""
    command, *rest = words
    if command == "python" and rest[:1] == ["-m"] and len(rest) > 1:
        command, rest = rest[1], rest[2:]
    if command in ("liver", "liver_hpc", "liver_hpc.submit"):
        arguments = ["submit", *rest] if command == "liver_hpc.submit" else rest
        try:
            new_parser().parse_args(arguments)
        except SystemExit as exit_:
            if exit_.code:
                yield f"{shlex.join(words)}: no such command or option"
    elif command == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"make has no target {w}" for w in rest if "=" not in w and w not in targets)
    elif words[:2] == ["python", "-m"]:
        yield from problems_of_module(command, rest)
    elif command not in OUTSIDE:
        yield f"{command}: no command that is known here"
    for word in rest:
        if word.partition("/")[0] in FOLDERS and "/" in word and not (ROOT / word).exists():
            yield f"{word}: no such file"


def problems_of_module(name: str, arguments: list[str]) -> Iterator[str]:
    """Options are looked for in the sources, for want of parsers that can all be asked."""
    folder = name.partition(".")[0]
    if folder not in FOLDERS or importlib.util.find_spec(name) is None:
        yield f"python -m {name}: no such module"
        return
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))
    text = "".join(sources)
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        if f'"{option}"' not in text and f'"{option.removeprefix("--")}"' not in text:
            yield f"python -m {name}: no option {option}"


# ---- what the text names


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = prose_of(page.read_text(encoding="utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue  # outside of the repository
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Those of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "name",
    [
        *(entries.JOURNAL_FILE, epoch.EPOCHS, tracking.DIRECTORY, place_file(ROOT).name),
        *(outcome.COORDINATOR_FILE, outcome.OUTCOME_FILE, outcome.AGAIN_FILE, outcome.WORLD_FILE),
        *(burst_jobs.RECORD_FILE, script.BURST_SCRIPT, run_job.JOB_FILE, orphaned.ENVIRONMENT_FILE),
    ],
)
def test_what_a_run_directory_has_is_in_the_page(name: str) -> None:
    page = (ROOT / "docs" / "how-to" / "report.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## What else lies in a run directory\n")
    assert f"`{name}`" in table.replace("/`", "`")


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    """In code spans: whatever begins with a folder of the repository, or ends as a source does and
    names its folder, which may be one of liver_hpc."""
    text = prose_of(page.read_text(encoding="utf-8"))
    named = [span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w./-]+", span)]
    missing = [
        name
        for name in named
        if "/" in name
        and not name.startswith("/")
        and (name.partition("/")[0] in FOLDERS or name.endswith((".py", ".md")))
        and not any((base / name).exists() for base in (ROOT, ROOT / "liver_hpc", page.parent))
    ]
    assert missing == []


# ---- that all this would be noticed


def block(info: str, text: str) -> Block:
    (found,) = blocks_in(f"```{info}\n{text}\n```\n", ROOT / "docs" / "example.md")
    return found


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("liver submit --config run.yaml --dry-run", ""),
        ("liver sumbit --config run.yaml", "no such command or option"),
        ("A=1 liver resize latest --workers 4 | tail -1", ""),
        ("liver resize latest --workers 4 --layout tp=2", "no such command or option"),
        ("sudo make slurm-demo DEMO_ARGS=--quick", ""),
        ("make slurmdemo", "make has no target slurmdemo"),
        ("python -m slurm.testbed up --nodes 4", ""),
        ("python -m slurm.testbed up \\\n  --knots 4", "no option --knots"),
        ("python -m slurm.tested up", "no such module"),
        ("sbatch slurm/liver.sbatch configs/slurm.yaml", ""),
        ("sbatch slurm/other.sbatch", "slurm/other.sbatch: no such file"),
        ("squeue # && nothing\nsinfo && frobnicate now", "frobnicate: no command"),
    ],
)
def test_a_command_that_is_not_run_is_checked(command: str, problem: str) -> None:
    found = [p for words in commands_in(f"{command}\n") for p in problems_of(words)]
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    run(block("sh", "true"), tmp_path)
    run(block("python", "import json"), tmp_path)
    for info, text in (("sh", "false; true"), ("sh", "true | liver nothing"), ("python", "1 / 0")):
        with pytest.raises(AssertionError, match=r"docs/example\.md:1"):
            run(block(info, text), tmp_path)


def test_a_run_file_with_a_wrong_key_is_noticed() -> None:
    check_run_file(block("yaml", "policy: {settle_s: 1.0}"))
    for text in ("policy: {settles: 1.0}", "train: {steps: 1, global_batch: 1}"):
        with pytest.raises(ConfigError, match=r"settles|workers"):
            check_run_file(block("yaml", text))


def test_a_fence_that_says_nothing_is_noticed() -> None:
    assert len(list(breaches(block("", "x")))) == 1
    assert len(list(breaches(block("sh somewhere", "x")))) == 1
    with pytest.raises(AssertionError, match=r"example\.md:2: an indented fence"):
        blocks_in("1. Try it:\n   ```sh\n   false\n   ```\n", ROOT / "docs" / "example.md")
    assert list(breaches(block("python file=mirror.py", "x"))) == []
