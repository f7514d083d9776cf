"""Two worlds of a script in one process: one trains, one is rehearsed, in turns and at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import apart

pytestmark = pytest.mark.timeout(200)

WORDS = """
--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--seq-length 16 --max-position-embeddings 16 --swiglu --disable-bias-linear
--attention-dropout 0.1 --hidden-dropout 0.1 --transformer-impl local --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 100
--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 32
--eval-interval 5 --eval-iters 1
"""
STEPS = 12


def _recipe(
    process: WorkerProcess, checkout: str, directory: str, words: str, script: str = ""
) -> Any:
    from liver_hpc.recipes.base import load_recipe, put_first_on_path
    from liver_hpc.recipes.completion import load_users_run

    values = {
        "recipe": "liver_hpc.recipes.megatron_lm:Pretrain",
        "model": {
            "script": script or f"{checkout}/pretrain_gpt.py",
            "megatron_lm": checkout,
            "args": words,
        },
        "workers": {"initial": 1, "max": 4},
        "layouts": {1: {"dp": 1}, 4: {"tp": 2, "pp": 2}},
        "cluster": {"kind": "local"},
    }
    file = Path(directory) / f"run-{process.worker}.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    config = load_users_run(file)
    put_first_on_path(config)
    return load_recipe(config)


def _train_beside_rehearsals(process: WorkerProcess, checkout: str, directory: str) -> Any:
    """Losses of a world alone; then of another one like it, while a third world of another layout
    is rehearsed: in turns for half of the steps, at once for the rest."""
    from liver_hpc.layout.coordinates import Layout, RankMap
    from liver_hpc.world.derive import Derivation
    from liver_hpc.world.world import World
    from tests.integration.worlds import begin_at, train

    recipe = _recipe(process, checkout, directory, WORDS)
    alone, shared = Layout(1, 1, 1), Layout(2, 2, 1)
    recipe.spec = Derivation(recipe).spec([alone, shared])
    recipe.open(Path(directory))

    def connected(generation: int) -> World:
        world = World(recipe, RankMap(alone, (0,)), 0, generation, process.device)
        world.book.connect(process.network, process.store, 30.0)
        world.state.initialize(recipe.initial, 3)
        begin_at(world, 0)
        return world

    world = connected(0)
    assert world.chunks[0].ddp_config.check_for_nan_in_grad, "as Megatron has it unless told"
    wanted = train(world, range(STEPS))
    world.close()
    world = connected(1)
    target = World(recipe, RankMap(shared, (0, 1, 2, 3)), 0, 2, process.device)
    found = []
    for step in range(STEPS // 2):
        target.warm_up()
        found += train(world, [step])
    over = threading.Event()

    def rehearse() -> int:
        rehearsals = 0
        while not over.is_set():
            target.warm_up()
            rehearsals += 1
        return rehearsals

    with ThreadPoolExecutor(1) as beside:
        rehearsed = beside.submit(rehearse)
        try:
            found += train(world, range(STEPS // 2, STEPS))
        finally:
            over.set()
        return wanted, found, rehearsed.result(60.0)


def test_a_rehearsal_of_the_script_leaves_training_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    checkout = repository / "tests" / "standin_megatron_lm"
    ((wanted, found, rehearsals),) = run_workers(
        _train_beside_rehearsals, 1, tmp_path, str(checkout), str(tmp_path)
    )
    assert len(found) == STEPS
    assert found == wanted  # dropout's masks, too
    assert rehearsals


HPC = """
import faulthandler, logging, signal, sys
faulthandler.enable()
signal.signal(signal.SIGUSR1, print)
logging.getLogger("own").handlers = [logging.StreamHandler()]
print("the script speaks", file=sys.stderr)
"""


def _run_on_a_thread(process: WorkerProcess, checkout: str, directory: str) -> Any:
    """What a script of HPC has changed, run as a worker boots, and as it prepares a world."""
    import faulthandler
    import logging
    import os
    import signal

    from liver_hpc.layout.coordinates import Layout

    plain, script = Path(checkout, "pretrain_gpt.py").read_text(), Path(directory, "hpc.py")
    begin = 'if __name__ == "__main__":'
    script.write_text(plain.replace(begin, HPC + begin))
    recipe = _recipe(process, checkout, directory, WORDS, str(script))
    before = signal.getsignal(signal.SIGUSR1)
    recipe.script.at(Layout(1, 1, 1))
    with ThreadPoolExecutor(1) as beside:
        beside.submit(recipe.script.at, Layout(2, 2, 1)).result(60.0)
    (handler,) = logging.getLogger("own").handlers
    read, write = os.pipe()
    kept = os.dup(2)
    os.dup2(write, 2)
    handler.stream.write("ten steps later")  # type: ignore[attr-defined]
    handler.stream.flush()  # type: ignore[attr-defined]
    os.dup2(kept, 2)
    faulthandler.disable()
    return signal.getsignal(signal.SIGUSR1) is before, os.read(read, 100)


def test_a_script_may_begin_as_those_of_hpc_do(repository: Path, tmp_path: Path) -> None:
    checkout = repository / "tests" / "standin_megatron_lm"
    ((kept, written),) = run_workers(_run_on_a_thread, 1, tmp_path, str(checkout), str(tmp_path))
    assert kept
    assert written == b"ten steps later"


def _told_during_a_ramp_up(process: WorkerProcess, checkout: str, directory: str) -> Any:
    """What the script may ask Megatron for after each step: its micro-batches, its batch, its
    iteration, and the samples before it; and what its checkpoints say after six steps."""
    from megatron.core import num_microbatches_calculator as calculator

    from liver_hpc.layout.coordinates import Layout
    from liver_hpc.world import thread
    from liver_hpc.world.derive import Derivation
    from tests.integration.worlds import connected, train

    words = WORDS.replace("--train-iters 100", "--train-samples 400 --rampup-batch-size 2 1 12")
    recipe = _recipe(process, checkout, directory, words)
    recipe.spec = Derivation(recipe).spec([Layout(1, 1, 1)])
    recipe.open(Path(directory))
    told = []
    with connected(process, recipe, "dp1", 0) as world:
        assert world is not None
        for step in range(6):
            train(world, [step])
            with thread.groups_in_use(world.groups):
                args = recipe.script.arguments_of(world.groups)
                numbers = (
                    calculator.get_num_microbatches(),
                    calculator.get_current_global_batch_size(),
                    args.curr_iteration,
                    args.consumed_train_samples,
                )
                told.append(numbers)
        with thread.groups_in_use(world.groups):
            operations = recipe.checkpoint_extras(6)["num_floating_point_operations_so_far"]
            of_one = recipe.script.training.num_floating_point_operations(args, 1)
    return told, operations / of_one, recipe.config.train.steps, args.train_iters


def test_a_script_is_told_the_batch_of_the_step(repository: Path, tmp_path: Path) -> None:
    checkout = repository / "tests" / "standin_megatron_lm"
    ((told, samples, steps, iterations),) = run_workers(
        _told_during_a_ramp_up, 1, tmp_path, str(checkout), str(tmp_path)
    )
    batches = [2, 2, 2, 3, 3, 4]
    before = [0, 2, 4, 6, 9, 12]
    assert told == [(batch, batch, n, before[n]) for n, batch in enumerate(batches)]
    assert samples == 16
    assert steps == iterations == 5 + (400 - 12) // 4


def _courses(process: WorkerProcess, checkout: str, directory: str, all_words: list[str]) -> Any:
    """Losses and gradient norms of the script with each of these arguments."""
    from liver_hpc.layout.coordinates import Layout
    from liver_hpc.world.derive import Derivation
    from tests.integration.worlds import connected, train

    found = []
    for generation, words in enumerate(all_words):
        recipe = _recipe(process, checkout, directory, words)
        recipe.spec = Derivation(recipe).spec([Layout(1, 1, 1)])
        recipe.open(Path(directory))
        with connected(process, recipe, "dp1", generation) as world:
            found.append(train(world, range(STEPS)))
    return found


def test_a_script_whose_loss_is_per_token_counts_each_micro_batch_by_its_tokens(
    repository: Path, tmp_path: Path
) -> None:
    """As one micro-batch of the whole batch does; some samples have a token that does not count."""
    checkout = repository / "tests" / "standin_megatron_lm"
    words = WORDS.replace("dropout 0.1", "dropout 0") + " --eod-mask-loss"
    per_token = f"{words} --calculate-per-token-loss"
    whole = words.replace("--micro-batch-size 1", "--micro-batch-size 4")
    ((wanted, found, alike),) = run_workers(
        _courses, 1, tmp_path, str(checkout), str(tmp_path), [whole, per_token, words]
    )
    assert apart(found, wanted) < 1e-5
    assert apart(alike, wanted) > 1e-4


def _told_of_lists(process: WorkerProcess, checkout: str, directory: str) -> Any:
    """With what workers say that they compute, and how many index caches the run knows, as the list
    of its data is edited between their boots."""
    listed, told = Path(directory, "list.txt"), []
    for blend in ("1 /data/a", "1 /data/a", "1 /data/b"):
        listed.write_text(blend, encoding="utf-8")
        recipe = _recipe(process, checkout, directory, f"{WORDS} --data-args-path {listed}")
        recipe.open(Path(directory))
        told.append((dict(recipe.texts()), len([*Path(directory).rglob("*.complete")])))
    return told


def test_workers_with_another_list_of_data_do_not_train_together(
    repository: Path, tmp_path: Path
) -> None:
    """Nor does one take the other's index cache for its own."""
    checkout = repository / "tests" / "standin_megatron_lm"
    (((first, _), (same, known), (other, more)),) = run_workers(
        _told_of_lists, 1, tmp_path, str(checkout), str(tmp_path)
    )
    assert first == same
    assert {name for name in same if same[name] != other[name]} == {
        f"--data-args-path {tmp_path}/list.txt"
    }
    assert (known, more) == (1, 2)
