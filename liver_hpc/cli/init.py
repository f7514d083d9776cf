"""`liver init`: a short run file to start from, of flags, or of answers where somebody is asked."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.cli.check import local_workers_limit
from liver_hpc.cli.options import RUN_FILE, positive
from liver_hpc.config.load import dump_value, schema_text
from liver_hpc.config.schema import DataSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.files import write_whole
from liver_hpc.recipes.text_data import STDLIB, text_files

SCHEMA_FILE = "liver-schema.json"
"""Beside the run file: it goes where that goes, into a repository or to a colleague."""
_OWN_DATA_ROWS = 50304
_CPUS_PER_GPU = 4


@dataclass(frozen=True)
class Question:
    """About one option. default: where nothing is answered, and where nobody is asked; by the
    options so far. of: the option and its value that it belongs to. required: there is no default.
    fault: what is wrong with a value, by the options so far; empty where nothing is.
    """

    name: str
    text: str
    default: Callable[[argparse.Namespace], Any] = lambda options: None
    kind: Callable[[str], Any] = str
    of: tuple[str, str] | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    fault: Callable[[argparse.Namespace, Any], str] = lambda options, value: ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def _data_fault(options: argparse.Namespace, data: str) -> str:
    if data == STDLIB or _is_pair(data):
        return ""
    try:
        text_files(DataSection(text=[data]))
    except ConfigError as error:
        return str(error).removeprefix("data.text: ")
    return ""


def _file_fault(options: argparse.Namespace, file: str) -> str:
    return "" if os.path.isfile(os.path.expanduser(file)) else f"there is no file {file!r}"


def _workers_fault(options: argparse.Namespace, workers: int) -> str:
    most = _most_workers(options)
    return "" if workers <= most else f"a local run on this machine may have {most:g} workers"


def _max_workers_fault(options: argparse.Namespace, workers: int) -> str:
    if workers < options.workers:
        return f"fewer than the {options.workers} at the start"
    nodes, most = (
        -(-count // (options.gpus_per_node or 1)) for count in (options.workers, workers)
    )
    if options.burst_partition is not None and nodes == most:
        return f"no more nodes than the {nodes} at the start: --burst-partition would have none"
    return _workers_fault(options, workers)


def _most_workers(options: argparse.Namespace) -> float:
    return local_workers_limit() if options.cluster == "local" else math.inf


_GPT, _SCRIPT, _SLURM = ("recipe", "gpt"), ("recipe", "megatron-lm"), ("cluster", "slurm")
_QUESTIONS = (
    Question("recipe", "What is trained", lambda options: "gpt", choices=("gpt", "megatron-lm")),
    Question(
        "data",
        "Text files (a pattern), PREFIX of a .bin/.idx pair, or python-stdlib",
        lambda options: STDLIB,
        of=_GPT,
        fault=_data_fault,
    ),
    Question("script", "The script that trains", of=_SCRIPT, required=True, fault=_file_fault),
    Question("args", "The file with its arguments", of=_SCRIPT, required=True, fault=_file_fault),
    Question("cluster", "Where it runs", lambda options: "local", choices=("local", "slurm")),
    Question("partition", "Partition of the nodes that are held throughout", of=_SLURM),
    Question("burst_partition", "Partition where preemptible nodes come from", of=_SLURM),
    Question("gpus_per_node", "GPUs of a node, a worker on each", kind=positive, of=_SLURM),
    Question(
        "workers",
        "Workers at the start",
        lambda options: options.gpus_per_node or 2,
        positive,
        fault=_workers_fault,
    ),
    Question(
        "max_workers",
        "Workers at most",
        lambda options: min(2 * options.workers, _most_workers(options)),
        positive,
        fault=_max_workers_fault,
    ),
    Question("steps", "Training steps", lambda options: 1000, positive, _GPT),
    Question(
        "batch", "Samples of a step", lambda options: max(8, options.max_workers), positive, _GPT
    ),
)


def init(options: argparse.Namespace, ask: Callable[[str], str] = input) -> None:
    """Writes the run file, and the schema beside it. In a terminal whatever no flag says is asked.

    Raises ConfigError for flags that contradict each other, where a file is in the way, or where it
    cannot be written; then nothing is written.
    """
    path = options.file
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a directory; name the file that is to be written")
    if os.path.exists(path) and not options.force:
        raise ConfigError(f"{path} is there already; --force writes over it")
    of_slurm = (options.partition, options.burst_partition, options.gpus_per_node)
    if options.cluster is None and any(of_slurm):
        options.cluster = "slurm"
    asks = in_terminal() and not options.defaults
    for question in _QUESTIONS:
        _settle(question, options, ask if asks else None)
    schema = path.with_name(SCHEMA_FILE)
    try:
        write_whole(schema, schema_text())
        write_whole(path, run_file(options))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path} is written, and {schema} for your editor")
    print(f"next: liver submit --config {path} --dry-run")


def in_terminal() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _settle(
    question: Question, options: argparse.Namespace, ask: Callable[[str], str] | None
) -> None:
    """Gives an option its value: its flag's, an answer, or the default."""
    name, given = question.name, getattr(options, question.name)
    if question.of is not None and getattr(options, question.of[0]) != question.of[1]:
        if given is not None:
            which, value = question.of
            got = getattr(options, which)
            raise ConfigError(f"{question.flag} belongs to --{which} {value}, got --{which} {got}")
    elif given is not None:
        if fault := question.fault(options, given):
            raise ConfigError(f"{question.flag} {given}: {fault}")
    else:
        default = question.default(options)
        answer = default if ask is None else _answer(question, options, default, ask)
        if answer is None and question.required:
            raise ConfigError(f"--recipe megatron-lm wants {question.flag}")
        setattr(options, name, answer)


def _answer(
    question: Question, options: argparse.Namespace, default: Any, ask: Callable[[str], str]
) -> Any:
    among = f" ({', '.join(question.choices)})" if question.choices else ""
    shown = "" if question.required else f" [{'none' if default is None else default}]"
    while True:
        try:
            text = ask(f"{question.text}{among}{shown}: ").strip()
        except EOFError:
            raise ConfigError("there are no more answers; nothing was written") from None
        if not text and not question.required:
            return default
        try:
            if text and (not question.choices or text in question.choices):
                value = question.kind(text)
                if not (fault := question.fault(options, value)):
                    return value
                print(fault)
            else:
                print(f"wanted {' or '.join(question.choices) or 'an answer'}, got {text!r}")
        except argparse.ArgumentTypeError as error:
            print(error)


# ---- the file


def run_file(options: argparse.Namespace) -> str:
    """Its text, with a comment wherever somebody will want another value."""
    parts = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        "# What each key means: `liver schema`, or docs/reference/run-file.md.",
        f"name: {_name(options.file)}",
        "",
        *(_gpt(options) if options.recipe == "gpt" else _script(options)),
        "",
        "workers:",
        f"  initial: {options.workers}",
        f"  max: {options.max_workers}",
        "",
        "# What the run may become, by number of workers; the first of each is preferred.",
        "layouts:",
        *_layouts(options),
        "",
        *(_slurm(options) if options.cluster == "slurm" else ("cluster:", "  kind: local")),
    ]
    return "\n".join([*parts, ""])


def _gpt(options: argparse.Namespace) -> list[str]:
    rows, what = 512, "bytes of text need 257"
    if _is_pair(options.data):
        data, rows = f"  prefix: {dump_value(options.data)}", _OWN_DATA_ROWS
        what = "your tokenizer's"
    elif options.data == STDLIB:
        data = f"  text: {STDLIB} # or [my/*.txt], or `prefix:` of a pair of .bin and .idx"
    else:
        data = f"  text: {dump_value([options.data])}"
    return [
        "model: # a GPT; sizes in elements",
        "  layers: 4",
        "  hidden: 256",
        "  ffn_hidden: 512",
        "  heads: 4",
        "  seq_length: 128",
        f"  vocab_size: {rows} # {what}",
        "  dtype: fp32 # or bf16",
        "",
        "data:",
        data,
        "",
        "train:",
        f"  steps: {options.steps}",
        f"  global_batch: {options.batch} # the same in every layout",
        "",
        "optimizer:",
        "  lr: 1.0e-3",
    ]


def _is_pair(data: str) -> bool:
    """Whether it is the prefix of indexed data."""
    return all(os.path.exists(os.path.expanduser(f"{data}{end}")) for end in (".bin", ".idx"))


def _script(options: argparse.Namespace) -> list[str]:
    return [
        "recipe: liver_hpc.recipes.megatron_lm:Pretrain",
        "model: # steps, batch and learning rate are the script's own arguments",
        f"  script: {dump_value(options.script)}",
        f"  args: {dump_value({'file': options.args})}",
    ]


def _layouts(options: argparse.Namespace) -> list[str]:
    """Halves of the first number, and doubles of it up to the most. Of a script it is not known
    whether its model can be split."""
    counts = {options.max_workers}
    count = options.workers
    while count <= options.max_workers:
        counts.add(count)
        count *= 2
    count = options.workers
    while count % 2 == 0:
        count //= 2
        counts.add(count)
    lines = []
    for count in sorted(counts):
        split = f", {{tp: 2, dp: {count // 2}}}" if count % 2 == 0 else ""
        if options.recipe == "gpt":
            lines.append(f"  {count}: [{{dp: {count}}}{split}]")
        else:
            lines.append(f"  {count}: {{dp: {count}}}")
    return lines


def _slurm(options: argparse.Namespace) -> list[str]:
    """Nodes for the first workers that are held throughout; more of them from where preemptible
    ones come from, or of the same partition, for when they are asked for."""
    each = options.gpus_per_node or 1
    nodes = -(-options.workers // each)
    more = -(-options.max_workers // each) - nodes
    partition = "null" if options.partition is None else dump_value(options.partition)
    per_node = [f"workers_per_node: {each}"]
    per_node += [f"gpus_per_node: {each}"] if options.gpus_per_node else []
    cpus = _CPUS_PER_GPU * each if options.gpus_per_node else each
    per_node += [
        "# Cores of a node for all its workers; null: what Slurm gives one task, often one core.",
        f"cpus_per_node: {cpus}",
    ]

    def node_lines(indent: str) -> list[str]:
        return [f"{indent}{line}" for line in per_node]

    lines = [
        "cluster:",
        "  kind: slurm",
        "  timeout_min: 60 # the job's time limit",
        "  slurm:",
        "    components: # held from start to end; the coordinator runs on the first node",
        "      - name: main",
        f"        partition: {partition} # null: the default one",
        f"        nodes: {nodes}",
        *node_lines("        "),
    ]
    if more > 0 and options.burst_partition is not None:
        lines += [
            "    burst: # preemptible nodes, asked for and given back while the run goes on",
            f"      partition: {dump_value(options.burst_partition)}",
            f"      max_nodes: {more}",
            *node_lines("      "),
        ]
    elif more > 0:
        lines += [
            "      - name: more",
            "        join: asked # train when `liver resize` asks for so many workers",
            f"        partition: {partition}",
            f"        nodes: {more}",
            *node_lines("        "),
        ]
    return [*lines, '    setup: [] # such as ["module load cuda"]']


def _name(file: Path) -> str:
    """A run's name of that of the file; of its directory's, where the file has the usual one."""
    names = [file.stem] if file.name != RUN_FILE else [file.absolute().parent.name, file.stem]
    fit = (name for name in names if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.A))
    return dump_value(next(fit, "run"))
