"""`python -m benchmarks.script`: an unchanged script of Megatron-LM, elastic and by torchrun."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from benchmarks.harness import (
    BenchmarkResult,
    Spread,
    interleaved,
    loss_difference,
    parser,
    reported,
)
from benchmarks.script.plain import PlainJob, run_plain
from benchmarks.script.sides import (
    SETTLED_STEPS,
    Elastic,
    Outcome,
    Plain,
    ScriptSide,
    cpu_s_of,
)
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.completion import load_users_run

ELASTIC, PLAIN = "elastic", "plain"
LAYOUT, OTHER = Layout(1, 1, 2), Layout(1, 2, 1)
COMMON_STEPS = 2
COMPARED_STEPS = 50
START_S = 300.0

METHOD = {
    "sides": "pretrain_gpt.py of the checkout, unchanged, with the same arguments: by torchrun, "
    "and as a whole run of liver_hpc (coordinator, agent, workers); fp32, mock data, dp2, one "
    "thread a process, the same stand-ins for CUDA, norm and attention on both sides",
    "common checkpoint": f"written by the script after {COMMON_STEPS} steps (torch_dist, with the "
    "optimizer's state); both sides begin with --load of it",
    "interleaving": "both are alive and warm; in turns one trains for a block of steps while all "
    "processes of the other are stopped (SIGSTOP). Between two blocks of its own the elastic run "
    f"goes to {OTHER} and back, live",
    "throughput_ratio": "CPU seconds a token of the script's ranks over those of the workers, "
    "from a step's end to a step's end; start-up, handoffs and the steps beside them are outside; "
    "median of the pairs of blocks",
    "throughput_ratio_all": "the same, with torchrun on one side, coordinator and agent on the "
    "other",
    "max_relative_difference": f"of loss and gradient norm, over the first {COMPARED_STEPS} steps "
    "from the checkpoint that both have done",
}
_MODEL = """
--num-layers {layers} --hidden-size {hidden} --num-attention-heads 4
--seq-length {sequence} --max-position-embeddings {sequence}
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm
--use-cpu-initialization --use-distributed-optimizer
--train-iters 100000 --micro-batch-size 2 --global-batch-size {batch}
--lr 1e-3 --lr-decay-style constant
--mock-data --tokenizer-type NullTokenizer --vocab-size 255
--eval-interval 1000000 --eval-iters 0 --log-interval 1 --ckpt-format torch_dist
--dist-ckpt-optim-fully-reshardable
"""


@dataclass(frozen=True)
class Effort:
    """How much is measured; quick: a model that steps in milliseconds."""

    pairs: int = 7
    steps: int = 40
    layers: int = 4
    hidden: int = 256
    sequence: int = 128
    batch: int = 8

    def words(self) -> list[str]:
        """The script's arguments, but for its length and its checkpoints."""
        return _MODEL.format(**vars(self)).split()


QUICK = Effort(pairs=2, steps=6, layers=2, hidden=64, sequence=32)


@dataclass(frozen=True)
class Block:
    """What a side spent on some steps. cpu_s: of what trains; all_cpu_s: of all its processes."""

    steps: int
    cpu_s: float
    all_cpu_s: float


def main(arguments: list[str] | None = None) -> int:
    options = parser("script", __doc__ or "")
    options.add_argument(
        "--megatron-lm", type=Path, required=True, metavar="PATH", help="a checkout of Megatron-LM"
    )
    given = options.parse_args(arguments)
    checkout = given.megatron_lm.absolute()
    effort = QUICK if given.quick else Effort()
    return reported(lambda: run(checkout, effort), given)


def run(checkout: Path, effort: Effort) -> BenchmarkResult:
    """Makes the common checkpoint, starts both sides, measures them in turns, ends them."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = partial(PlainJob, checkout, ranks=LAYOUT.workers)
        words = effort.words()
        start = _common_start(job, effort, directory)
        words += ["--load", str(start), "--exit-on-missing-checkpoint"]
        with Elastic(_config(checkout, words, directory)) as elastic:
            elastic.reach(COMMON_STEPS + SETTLED_STEPS)
            elastic.pause()
            with Plain(job(words), directory / PLAIN) as plain:
                plain.reach(COMMON_STEPS + SETTLED_STEPS)
                plain.pause()
                return _measured(elastic, plain, effort)


def _common_start(job: partial[PlainJob], effort: Effort, directory: Path) -> Path:
    """Where the script has left a checkpoint, with the schedule of the runs that go on from it."""
    start, count = directory / "start", str(COMMON_STEPS)
    words = [*effort.words(), "--exit-interval", count]
    words += ["--save", str(start), "--save-interval", count]
    deadline = Deadline.after(SystemClock(), START_S, "the script to write a checkpoint")
    run_plain(job(words), directory / "first", deadline)
    return start


def _config(checkout: Path, words: Sequence[str], directory: Path) -> RunConfig:
    document = {
        "name": "script",
        "recipe": "liver_hpc.recipes.megatron_lm:Pretrain",
        "model": {"script": str(checkout / "pretrain_gpt.py"), "args": [*words]},
        "runs_directory": str(directory / "runs"),
        "workers": {"initial": LAYOUT.workers, "max": LAYOUT.workers},
        "layouts": {LAYOUT.workers: [{"dp": LAYOUT.dp}, {"pp": OTHER.pp}]},
        "cluster": {"kind": "local"},
        # Processes that are stopped for a block must not count as lost.
        "deadlines": {"heartbeat_s": 600.0, "control_s": 600.0, "collective_s": 900.0},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_users_run(path)


def _measured(elastic: Elastic, plain: Plain, effort: Effort) -> BenchmarkResult:
    def elastically() -> Block:
        elastic.resume()
        elastic.there_and_back(OTHER, LAYOUT)
        return _block(elastic, effort.steps)

    def plainly() -> Block:
        plain.resume()
        return _block(plain, effort.steps)

    blocks = interleaved({ELASTIC: elastically, PLAIN: plainly}, effort.pairs)
    return result(blocks, difference(elastic.outcomes(), plain.outcomes()), effort)


def _block(side: ScriptSide, steps: int) -> Block:
    """What so many steps of a side that trains cost; it is stopped after them."""
    every, training = side.processes(), side.training()
    begun = side.reach(side.reach(0) + SETTLED_STEPS)
    before = cpu_s_of(every)
    done = side.reach(begun + steps)
    spent = {pid: cpu_s - before[pid] for pid, cpu_s in cpu_s_of(every).items()}
    side.pause()
    return Block(done - begun, sum(spent[each.pid] for each in training), sum(spent.values()))


def difference(some: Mapping[int, Outcome], others: Mapping[int, Outcome]) -> float:
    """Largest relative difference of loss and gradient norm, over the first steps of both. Raises
    LiverError without any."""
    common = sorted(some.keys() & others.keys())[:COMPARED_STEPS]

    def of(side: Mapping[int, Outcome], each: int) -> dict[int, float]:
        return {step: side[step][each] for step in common}

    numbers = range(len(Outcome._fields))
    return max(loss_difference(of(some, each), of(others, each)) for each in numbers)


def result(blocks: Mapping[str, Sequence[Block]], apart: float, effort: Effort) -> BenchmarkResult:
    """The figures of some pairs of blocks."""
    pairs = [*zip(blocks[PLAIN], blocks[ELASTIC], strict=True)]
    ratios = {
        "throughput_ratio": [
            (plain.cpu_s / plain.steps) / (live.cpu_s / live.steps) for plain, live in pairs
        ],
        "throughput_ratio_all": [
            (plain.all_cpu_s / plain.steps) / (live.all_cpu_s / live.steps) for plain, live in pairs
        ],
    }
    spread = {name: Spread.of(values) for name, values in ratios.items()}
    tokens = effort.batch * effort.sequence
    rows = [
        {
            "pair": number,
            "side": side,
            "steps": block.steps,
            "cpu_s_per_1000_tokens": 1000 * block.cpu_s / (block.steps * tokens),
            "all_cpu_s_per_1000_tokens": 1000 * block.all_cpu_s / (block.steps * tokens),
        }
        for number, pair in enumerate(pairs)
        for side, block in zip((PLAIN, ELASTIC), pair, strict=True)
    ]
    figures = {name: each.median for name, each in spread.items()}
    return BenchmarkResult(
        "script",
        figures | {"max_relative_difference": apart},
        rows,
        method=METHOD,
        spread=spread,
        repeats=len(pairs),
    )


if __name__ == "__main__":
    sys.exit(main())
