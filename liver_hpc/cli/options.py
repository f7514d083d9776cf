"""The commands of `liver` as a parser: their options, and examples of each. Imports next to
nothing, so that `--help` is quick."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from liver_hpc import __version__
from liver_hpc.cli.dashboard import add_options as add_dashboard_options
from liver_hpc.report.command import add_options as add_report_options

EXIT_BAD_INPUT = 2
RUN_FILE = "run.yaml"
RUNS_DIRECTORY = Path("runs")

LIVER_EXAMPLES = """\
liver init
liver submit --config run.yaml
liver list
liver status latest
"""
EXAMPLES = {
    "init": """\
liver init
liver init --steps 2000 --batch 16 --workers 2 --max-workers 4 --defaults
liver init train.yaml --cluster slurm --partition gpu --burst-partition preempt --gpus-per-node 8
liver init --recipe megatron-lm --script Megatron-LM/pretrain_gpt.py --args args.txt
""",
    "submit": """\
liver submit --config run.yaml --dry-run
liver submit --config run.yaml --set train.steps=500 --no-follow
liver submit --resume latest
""",
    "run": "liver run --config run.yaml --set name=trial\n",
    "coordinate": "liver coordinate latest\n",
    "list": "liver list\nliver list --runs-directory /scratch/runs --json\n",
    "status": "liver status latest\nliver status latest --json\n",
    "logs": """\
liver logs latest --follow
liver logs latest --worker 3
liver logs latest --agent a0
""",
    "events": """\
liver events latest --follow
liver events latest --since 1000 --json
""",
    "resize": """\
liver resize latest --workers 4
liver resize latest --layout tp=2,dp=2
""",
    "replace": "liver replace latest --worker 3\n",
    "drain": """\
liver drain latest n2 --within-s 60
liver drain latest n2 --undo
""",
    "stop": "liver stop latest --checkpoint\n",
    "dashboard": """\
liver dashboard latest
liver dashboard latest --port 8080
""",
    "report": """\
liver report latest
liver report latest --html report.html
""",
    "doctor": """\
liver doctor
liver doctor --config run.yaml --nodes 2 --partition gpu
""",
    "prepare-data": "liver prepare-data --config run.yaml\n",
    "check-model": """\
liver check-model --config run.yaml
liver check-model --config run.yaml --times
""",
    "schema": "liver schema\n",
}


class _Parser(argparse.ArgumentParser):
    """Every error starts with `liver: error:`, whichever command it is about."""

    def __init__(self, **settings: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter  # an example keeps its lines
        super().__init__(allow_abbrev=False, formatter_class=layout, **settings)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"liver: error: {message}\n")


def new_parser() -> argparse.ArgumentParser:
    """Parses to `command` and the options of that."""
    parser = _Parser(
        prog="liver",
        description="Train on a Slurm cluster (or this machine), and reshape the job as it runs.",
        epilog=_epilog(LIVER_EXAMPLES),
    )
    parser.add_argument("--version", action="version", version=f"liver {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, epilog=_epilog(EXAMPLES[name]))
        assert isinstance(added, argparse.ArgumentParser)
        return added

    def of_run(name: str, text: str) -> argparse.ArgumentParser:
        added = command(name, text)
        text = "a run directory, its name, or `latest`"
        run = added.add_argument("run", metavar="RUN", help=text)
        run.completer = _runs  # type: ignore[attr-defined]
        _directory(added, "default: runs", RUNS_DIRECTORY)
        return added

    _init_options(command("init", "write a run file to start from"))
    _submit_options(command("submit", "check a run file and launch the run"))
    _run_file(command("run", "run in this process, in a batch job of one's own"))
    taken = of_run("coordinate", "take over a run whose coordinator is gone, in this process")
    taken.add_argument(
        "--script-lost",
        action="store_true",
        help="in a step of a job whose batch script went with its node: do for the job what that "
        "would have done, near the end of its time and at the end of the run",
    )
    listed = command("list", "the runs here, the newest first")
    _directory(listed, "where runs are (default: runs)", RUNS_DIRECTORY)
    _json(listed, "a list of objects, for programs")
    _json(of_run("status", "what a run is doing"), "the snapshot, for programs")
    _logs_options(of_run("logs", "what a run's processes have logged"))
    _events_options(of_run("events", "what happened in a run, line by line"))
    _operator_options(of_run)
    add_dashboard_options(of_run("dashboard", "a page that follows a run, live"))
    add_report_options(of_run("report", "what a run's reconfigurations cost"))
    _doctor_options(command("doctor", "whether this cluster has what a run needs"))
    _run_file(command("prepare-data", "tokenize the text that a run file names"))
    checked = command("check-model", "whether the model is the same in all layouts")
    _run_file(checked)
    text = "instead: how long the layers take here, as the run file has it (model.layer_times)"
    checked.add_argument("--times", action="store_true", help=text)
    command("schema", "the JSON schema of run files, for editors")
    return parser


def _runs(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """What a shell offers in the place of RUN: the names in the directory of runs, `latest` too."""
    return [path.parent.name for path in parsed_args.runs_directory.glob(f"{prefix}*/run.yaml")]


def _epilog(examples: str) -> str:
    lines = "".join(f"  {line}\n" for line in examples.splitlines())
    return f"examples:\n{lines}"


# ---- options


def _run_file(parser: argparse.ArgumentParser, required: bool = True) -> None:
    add = parser.add_argument
    add("--config", type=Path, required=required, metavar="FILE", help="the run file")
    text = "a value in YAML that beats the run file's; may be given several times"
    add("--set", action="append", default=[], metavar="KEY.SUB=VALUE", help=text)


def _json(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _directory(parser: argparse.ArgumentParser, text: str, default: Path | None) -> None:
    parser.add_argument("--runs-directory", type=Path, default=default, metavar="DIR", help=text)


def _init_options(parser: argparse.ArgumentParser) -> None:
    """What is not given is asked for in a terminal, or has its default: None stands for that."""
    add = parser.add_argument
    text = "where to write it (default: run.yaml)"
    add("file", nargs="?", type=Path, default=Path(RUN_FILE), metavar="FILE", help=text)
    add("--recipe", choices=("gpt", "megatron-lm"), help="what is trained (default: gpt)")
    text = "python-stdlib, a pattern of text files, or PREFIX of a pair of .bin and .idx"
    add("--data", metavar="DATA", help=f"of gpt: {text} (default: python-stdlib)")
    add("--script", metavar="FILE", help="of megatron-lm: the script that trains")
    add("--args", metavar="FILE", help="of megatron-lm: a file with the script's arguments")
    add("--steps", type=positive, metavar="N", help="of gpt: length of the run (default: 1000)")
    add(
        "--batch",
        type=positive,
        metavar="N",
        help="of gpt: samples of a step (default: 8, or more)",
    )
    add("--workers", type=positive, metavar="N", help="workers at the start (default: 2)")
    text = "workers that the run may ever have (default: twice as many)"
    add("--max-workers", type=positive, metavar="N", help=text)
    add("--cluster", choices=("local", "slurm"), help="where it runs (default: local)")
    add("--partition", metavar="P", help="of slurm: that of the nodes that are held throughout")
    text = "of slurm: where preemptible nodes come from (default: none are used)"
    add("--burst-partition", metavar="P", help=text)
    add("--gpus-per-node", type=positive, metavar="G", help="of slurm: GPUs, a worker on each")
    add("--defaults", action="store_true", help="ask nothing, also in a terminal")
    add("--force", action="store_true", help="write over a file that is there")


def _submit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _run_file(parser, required=False)
    text = "instead of --config: an ended run goes on from its newest checkpoint"
    add("--resume", metavar="RUN", help=text)
    _directory(parser, "of --resume: where the run is (default: runs)", None)
    kinds = ("local", "slurm", "auto")
    add("--cluster", choices=kinds, help="where to run; beats the run file")
    text = "print the resolved run with its sizes, and what Slurm would get; launch nothing"
    add("--dry-run", action="store_true", help=text)
    text = "watch the run until it ends (the default in a terminal)"
    add("--follow", action=argparse.BooleanOptionalAction, help=text)


def _follow(parser: argparse.ArgumentParser) -> None:
    text = "go on with what comes, until the run ends"
    parser.add_argument("--follow", action="store_true", help=text)


def _logs_options(parser: argparse.ArgumentParser) -> None:
    """Without either of the two it is the coordinator's log."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--worker", type=_worker_id, metavar="W", help="a worker's, by its id")
    add("--agent", metavar="A", help="an agent's, by its name")
    _follow(parser)


def _events_options(parser: argparse.ArgumentParser) -> None:
    text = "only what came once so many steps were done"
    parser.add_argument("--since", type=_step, default=0, metavar="STEP", help=text)
    _json(parser, "one JSON object a line")
    _follow(parser)


def _operator_options(of_run: Callable[[str, str], argparse.ArgumentParser]) -> None:
    resize = of_run("resize", "give a running job another shape")
    add = resize.add_mutually_exclusive_group(required=True).add_argument
    text = "the layout to change to; also cp=, ep=, vpp=, and sp for sequence parallelism"
    add("--layout", metavar="tp=A,pp=B,dp=C", help=text)
    add("--workers", type=positive, metavar="N", help="take the preferred layout of N workers")
    replace = of_run("replace", "put a fresh worker in the place of another")
    replace.add_argument("--worker", type=_worker_id, required=True, metavar="W", help="its id")
    drain = of_run("drain", "leave a node live, so that it can be taken away")
    drain.add_argument("node", metavar="NODE", help="the node's name, as `liver status` has it")
    add = drain.add_mutually_exclusive_group().add_argument
    add("--within-s", type=_seconds, metavar="S", help="the window (default: the run file's)")
    add("--undo", action="store_true", help="a node that was drained is used again")
    add = of_run("stop", "end a run at its next step boundary").add_argument
    add("--timeout-s", type=_seconds, metavar="S", help="wait at most this long for the end")
    text = "write the state to disk first, so that the run can go on from there; exit code 1 where "
    add("--checkpoint", action="store_true", help=f"{text}that failed")


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _run_file(parser, required=False)
    add("--nodes", type=positive, metavar="N", help="also examine N nodes: takes them for a minute")
    add("--partition", metavar="P", help="take them from this partition")
    add("--account", metavar="A", help="take them on this account")
    add("--gpus-per-node", type=_gpus, metavar="G", help="take nodes with GPUs, for NCCL")
    add("--grant-s", type=_seconds, metavar="S", help="wait at most this long for the nodes")
    _directory(parser, "where runs are to be (default: runs)", None)
    _json(parser, "one JSON object a line")


def _value(wanted: str, kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """What takes a number from the command line; below `least` there is none."""

    def value(text: str) -> Any:
        try:
            if least <= kind(text) < math.inf:
                return kind(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")

    return value


def _gpus(text: str) -> int | str:
    from liver_hpc.config.schema import checked_gpus

    try:
        return checked_gpus(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


positive = _value("a whole number of at least 1", int, 1)
_worker_id = _value("a worker id such as 3", int, 0)
_step = _value("a number of steps", int, 0)
_seconds = _value("a number of seconds above 0", float, sys.float_info.min)
