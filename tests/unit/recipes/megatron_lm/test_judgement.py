"""Arguments that cannot be had, each refused by name at submit; what has no effect is told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.recipes.completion import load_users_run
from liver_hpc.recipes.megatron_lm import tables
from liver_hpc.recipes.megatron_lm.judgement import (
    _OWNED,
    ENTRIES,
    judged,
    notes_of_options,
    refused_words,
    without_layout,
)
from tests.unit.recipes.megatron_lm.jobs import JOB, run_file

REFUSED = {
    "--fp16": "a loss scale runs on across steps",
    "--loss-scale 1024": "a loss scale runs on across steps",
    "--fp8-format hybrid": "its scales run on across steps",
    "--fp4-format e2m1": "its scales run on across steps",
    "--decrease-batch-size-if-needed": "the same in every layout, and grows linearly alone",
    "--step-batch-size-schedule 8:100": "the same in every layout, and grows linearly alone",
    "--use-torch-fsdp2": "parameters are sharded in another way",
    "--use-megatron-fsdp": "parameters are sharded in another way",
    "--num-distributed-optimizer-instances 2": "spans all data-parallel workers",
    "--tensor-parallel-num-weight-shards 2": "no layout that a run can have",
    "--optimizer muon": "--optimizer adam",
    "--optimizer sgd": "--optimizer adam",
    "--use-precision-aware-optimizer": "the optimizer's state is fp32",
    "--exp-avg-dtype bf16": "the optimizer's state is fp32",
    "--ddp-reduce-scatter-with-fp32-accumulation": "added up and reduced in one precision",
    "--optimizer-cpu-offload": "state that is moved lies on the device",
    "--use-mup": "all have one learning rate, but embeddings and output layer",
    "--lr-decay-style inverse-square-root": "constant, linear, cosine and WSD decay",
    "--weight-decay-incr-style cosine": "weight decay is the same at every step",
    "--qk-clip": "the weights are changed after the optimizer's step",
    "--mla-down-proj-fusion": "its weight is two tensors of a checkpoint",
    "--cuda-graph-impl local": "a CUDA graph replays",
    "--enable-cuda-graph": "a CUDA graph replays",
    "--inprocess-restart": "the runtime restarts workers itself",
    "--sft": "have lengths of their own",
    "--hybrid-context-parallel": "have lengths of their own",
    "--cp-comm-type a2a+p2p": "groups of context parallelism are of one level",
    "--dataloader-type cyclic": "--dataloader-type single",
    "--dataloader-type external": "--dataloader-type single",
    "--fim-data": "its draws depend on which samples",
    "--data-parallel-random-init": "begin with different values",
    "--encoder-seq-length 8": "instead: --seq-length",
    "--ckpt-step 5": "a run begins with a whole checkpoint of the job, or, by --finetune,",
    "--no-save-optim": "a run begins with a whole checkpoint",
    "--use-checkpoint-args": "write the checkpoint's arguments out",
    "--ckpt-format torch": "--ckpt-format torch_dist",
    "--non-persistent-save-interval 5": "checkpoint.every_steps",
    "--save-wgrads-interval 5": "Megatron's own loop writes it",
    "--full-validation": "global batches of one validation set",
    "--multiple-validation-sets": "global batches of one validation set",
    "--skip-train": "a run trains to its end",
    "--yaml-cfg job.yaml": "model.args is where arguments are",
    "--init-model-with-meta-device": "parameters have memory before",
    "--export-kd-teacher-load t": "ModelOpt wraps the model",
    "--use-legacy-models": "the model is Megatron core's",
    "--perform-rl-step": "it is of another kind of training",
    "--inference-dynamic-batching": "it is of another kind of training",
    "--vision-pretraining": "it is of another kind of training",
    "--ict-head-size 8": "it is of another kind of training",
    "--tp-comm-overlap": "made once a process, for one layout",
    "--moe-token-dispatcher-type flex": "made once a process, for one layout",
    "--overlap-moe-expert-parallel-comm": "depends on the layout",
    "--ddp-num-buckets 4": "--ddp-bucket-size",
    "--reset-attention-mask": "not every kernel heeds one",
    "--batch-invariant-mode": "it sets up the whole process",
    "--hybrid-layer-pattern M*": "not tried with a live handoff",
    "--mtp-use-repeated-layer": "not tried with a live handoff",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name_when_the_run_file_is_read(words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_users_run(run_file(tmp_path, words))
    told = next(line for line in caught.value.args if words in line)
    assert told.startswith(f"{tmp_path}/run.yaml:2: model: {words}: not supported, ")
    assert REFUSED[words] in told


def test_all_are_told_at_once(tmp_path: Path) -> None:
    more = "--fp16 --sft --optimizer=lion --save x"
    with pytest.raises(ConfigError) as caught:
        load_users_run(run_file(tmp_path, more))
    assert len(caught.value.args) == 4


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer adam", "--optimizer=adam", "--ckpt-format torch_dist",
        "--dataloader-type single", "--cp-comm-type p2p all_gather", "--exp-avg-dtype fp32",
        "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler",
        "--weight-decay-incr-style constant", "--num-distributed-optimizer-instances 1",
        "--bf16 --grad-reduce-in-bf16",
        "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss",
        "--use-flash-attn --swiglu --no-rope-fusion --disable-bias-linear", "--own-option 3",
    ],
)  # fmt: skip
def test_what_can_be_had(words: str) -> None:
    assert refused_words(f"{JOB} {words}".split()) == []


def test_words_about_layouts_are_left_out() -> None:
    text = (
        "--lr 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size=4 --seed 3 "
        "--sequence-parallel --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer "
        "--no-overlap-p2p-communication --expert-tensor-parallel-size 1 --swiglu"
    )
    words = text.split()
    kept, dropped = without_layout(words)
    assert kept == ["--lr", "1", "--seed", "3", "--swiglu"]
    assert sorted([*kept, *dropped]) == sorted(words)


def test_what_is_left_out_or_has_no_effect_is_told() -> None:
    text = (
        "--context-parallel-size 2 --log-interval 10 --wandb-project p --async-save "
        "--exit-duration-in-mins 60 --no-load-rng --disable-gloo-process-groups "
        "--use-checkpoint-opt_param-scheduler"
    )
    assert [note.partition(": ")[2] for note in notes_of_options(text.split())] == [
        "the run's `layouts` decide, so these are left out: --context-parallel-size 2",
        "without effect here, as the run's journal, `liver status` and `liver report` tell what "
        "happens: --log-interval --wandb-project",
        "without effect here, as the runtime watches workers and their state, and ends a job in "
        "time, in its own way: --exit-duration-in-mins",
        "without effect here, as how a checkpoint is written is the runtime's matter: --async-save",
        "without effect here, as random numbers are functions of the step, not state: "
        "--no-load-rng",
        "without effect here, as groups, buffers and streams are the runtime's: "
        "--disable-gloo-process-groups",
        "without effect here, as a checkpoint with another schedule than the arguments' is "
        "refused: --use-checkpoint-opt_param-scheduler",
    ]
    assert notes_of_options(JOB.split()) == []


def test_what_the_parser_has_is_judged_whoever_set_it() -> None:
    defaults = {
        "sft": False,
        "lr": None,
        "optimizer": "adam",
        "new": 1,
        "cp_comm_type": ["p2p"],
    }
    parsed = {**defaults, "lr": 1.0, "rank": 3}
    assert judged(parsed, defaults) == []
    parsed |= {"sft": True, "new": 2, "optimizer": "muon", "cp_comm_type": ["p2p", "a2a+p2p"]}
    first, second, third, fourth = judged(parsed, defaults)
    assert first.startswith("--sft True: not supported, samples of several documents")
    assert second.startswith("--optimizer muon: not supported")
    assert third == "--new 2: not known to be supported"
    assert fourth.startswith("--cp-comm-type ['p2p', 'a2a+p2p']: not supported")


def test_each_name_is_in_one_table() -> None:
    twice = [name for name, count in Counter(name for name, _ in ENTRIES).items() if count > 1]
    assert twice == []
    # How the rate decays is the run file's, in the styles that it has.
    assert set(_OWNED) & {name for name, _ in ENTRIES} == {"lr_decay_style"}
    assert all(entry.group in tables.REFUSED for _, entry in ENTRIES if entry.allowed)
