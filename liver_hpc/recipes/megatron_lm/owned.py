"""What keys of the run file follow from a Megatron-LM job's options, by Megatron's own arithmetic
(`get_optimizer_param_scheduler`, `update_train_iters`, `get_blend_from_list`, `validate_args`)."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from liver_hpc.config.completion import Derived
from liver_hpc.config.indexed_data import PARTS, read_indexed_data, share_of
from liver_hpc.config.megatron_checkpoint import OWNER_FILE, TRACKER_FILE
from liver_hpc.config.problems import KeyPath
from liver_hpc.config.schema import RampupSection, TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.ramp import first_step_after, samples_before, step_of
from liver_hpc.recipes.megatron_lm.words import is_number, options_of

NUMBERS: Mapping[str, tuple[Callable[[str], Any], Any]] = {
    "train_iters": (int, None),
    "train_samples": (int, None),
    "global_batch_size": (int, None),
    "micro_batch_size": (int, None),
    "exit_interval": (int, None),
    "seed": (int, 1234),
    "ddp_bucket_size": (int, None),
    "lr": (float, None),
    "min_lr": (float, 0.0),
    "decoupled_lr": (float, None),
    "decoupled_min_lr": (float, None),
    "weight_decay": (float, 0.01),
    "adam_beta1": (float, 0.9),
    "adam_beta2": (float, 0.999),
    "adam_eps": (float, 1e-8),
    "clip_grad": (float, 1.0),
    "lr_decay_style": (str, "linear"),
    "lr_decay_iters": (int, None),
    "lr_decay_samples": (int, None),
    "lr_wsd_decay_style": (str, "exponential"),
    "lr_wsd_decay_iters": (int, None),
    "lr_wsd_decay_samples": (int, None),
    "lr_warmup_iters": (int, 0),
    "lr_warmup_samples": (int, 0),
    "lr_warmup_fraction": (float, None),
    "lr_warmup_init": (float, 0.0),
    "eval_interval": (int, None),
    "eval_iters": (int, 100),
    "save": (str, None),
    "save_interval": (int, None),
    "load": (str, None),
    "pretrained_checkpoint": (str, None),
    "split": (str, None),
    "data_args_path": (str, None),
    "per_split_data_args_path": (str, None),
}
"""Type and Megatron's default of the options with one value."""
SWITCHES = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "grad_reduce_in_bf16",
    "mock_data",
    "exit_on_missing_checkpoint",
    "finetune",
    "no_load_optim",
)
LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
RAMP = "rampup_batch_size"
"""Three words: the batch to begin with, by how much it grows, and in how many samples."""
SPLIT = "969, 30, 1"
"""What `validate_args` puts where --data-path has no --split."""

_OPTION_OF: Mapping[KeyPath, str] = {
    ("train", "global_batch"): "global_batch_size",
    ("train", "micro_batch"): "micro_batch_size",
    ("train", "seed"): "seed",
    ("train", "overlap_grad_reduce"): "overlap_grad_reduce",
    ("train", "overlap_param_gather"): "overlap_param_gather",
    ("train", "grad_reduce_in_bf16"): "grad_reduce_in_bf16",
    ("optimizer", "lr"): "lr",
    ("optimizer", "min_lr"): "min_lr",
    ("optimizer", "decoupled_lr"): "decoupled_lr",
    ("optimizer", "decoupled_min_lr"): "decoupled_min_lr",
    ("optimizer", "weight_decay"): "weight_decay",
    ("optimizer", "beta1"): "adam_beta1",
    ("optimizer", "beta2"): "adam_beta2",
    ("optimizer", "eps"): "adam_eps",
    ("optimizer", "clip_grad"): "clip_grad",
    ("schedule", "style"): "lr_decay_style",
    ("schedule", "warmup_init"): "lr_warmup_init",
}
"""Keys that are one option's value as it stands."""

KEYS: Mapping[KeyPath, tuple[str, ...]] = {
    ("train", "steps"): ("train_iters", "train_samples", "global_batch_size", RAMP),
    ("train", "rampup"): (RAMP,),
    ("train", "stop_every_steps"): ("exit_interval",),
    **{key: (name,) for key, name in _OPTION_OF.items()},
    ("train", "bucket_elements"): ("ddp_bucket_size",),
    ("schedule", "decay_steps"): ("lr_decay_iters", "lr_decay_samples", "train_iters"),
    ("schedule", "warmup_steps"): (
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
    ),
    ("schedule", "wsd_decay_steps"): ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("schedule", "wsd_decay_style"): ("lr_wsd_decay_style",),
    ("eval", "every_steps"): ("eval_interval",),
    ("eval", "steps"): ("eval_iters",),
    ("checkpoint", "directory"): ("save",),
    ("checkpoint", "every_steps"): ("save_interval",),
    ("checkpoint", "keep"): ("save",),
    ("checkpoint", "load"): ("load",),
    ("checkpoint", "weights"): ("finetune", "load", "pretrained_checkpoint"),
    ("data", "prefix"): ("data_path",),
    ("data", "blend"): ("data_path",),
    ("data", "split"): ("split",),
    ("data", "seed"): ("seed",),
}
"""Every key, and the options that it follows from."""
MAY_DIFFER: frozenset[KeyPath] = frozenset({("checkpoint", "keep")})
"""Of these, keys for which the run file may have another value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True)
class Owned:
    """Values of the options above, by their names in Megatron's parser; and how the words have
    those that they have."""

    values: Mapping[str, Any]
    words: Mapping[str, str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Owned:
        """Raises ConfigError for a value that is none."""
        parser = _Parser(allow_abbrev=False, add_help=False)
        for name, (kind, default) in NUMBERS.items():
            also = ["--persistent-save-interval"] if name == "save_interval" else []
            parser.add_argument(flag(name), *also, dest=name, type=kind, default=default)
        for name in SWITCHES:
            parser.add_argument(flag(name), action="store_true")
        for name in (*LISTS, RAMP):
            parser.add_argument(flag(name), nargs="*")
        values = vars(parser.parse_known_args(list(words))[0])
        said = {
            option.name.removeprefix("persistent_"): str(option) for option in options_of(words)
        }
        return cls(values, {name: said[name] for name in values if name in said})

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def source(self, *names: str) -> str:
        """Where a value comes from: the words for those of the options that are given."""
        told = [self.words[name] for name in names if name in self.words]
        return " and ".join(told) or f"Megatron's default of {flag(names[0])}"


def flag(name: str) -> str:
    """An option as words have it."""
    return f"--{name.replace('_', '-')}"


def problems_of(job: Owned) -> list[str]:
    """What is missing, or not meant together, as Megatron asserts it."""
    parts = (_missing(job), _in_object_stores(job), _contradictory(job), _ramp_problems(job))
    return [problem for part in parts for problem in part]


def _missing(job: Owned) -> Iterator[str]:
    if job["train_iters"] is None and job["train_samples"] is None:
        yield "--train-iters or --train-samples: one of them must be given"
    for name in ("micro_batch_size", "lr"):
        if job[name] is None:
            yield f"{flag(name)} must be given"
    if job["global_batch_size"] is None:
        yield (
            "--global-batch-size must be given: Megatron's default depends on the number of "
            "workers, and the global batch is the same in every layout"
        )
    for name in ("micro_batch_size", "global_batch_size", "train_iters", "train_samples"):
        if job[name] is not None and job[name] < 1:
            yield f"{flag(name)} {job[name]}: wanted at least 1"
    if job["eval_iters"] and job["eval_interval"] is None:
        yield "--eval-interval must be given, or --eval-iters 0: Megatron-LM divides by it"
    if job["save"] is not None and job["save_interval"] is None:
        yield "--save wants --save-interval, as Megatron does"
    if job["load"] is not None and any(Path(job["load"]).glob("*/modelopt_state")):
        yield (
            f"--load {job['load']}: not supported, its modelopt_state has Megatron wrap the model, "
            "which a run does not"
        )
    missing = lacks_checkpoint(job) and weights_of(job) is None
    if job["exit_on_missing_checkpoint"] and missing:
        yield f"--load {job['load']}: there is no {TRACKER_FILE}, and --exit-on-missing-checkpoint"


def _in_object_stores(job: Owned) -> Iterator[str]:
    for name in ("load", "save", "pretrained_checkpoint"):
        if "://" in (job[name] or ""):
            yield f"{flag(name)} {job[name]}: not supported, wanted a directory that all nodes see"


def _contradictory(job: Owned) -> Iterator[str]:
    samples = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
    iters = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
    pairs = [("train_iters", other) for other in ("train_samples", *samples)]
    pairs += [("train_samples", other) for other in iters]
    pairs += [("lr_warmup_fraction", other) for other in ("lr_warmup_iters", "lr_warmup_samples")]
    for one, other in pairs:
        if job[one] is not None and job[other]:
            yield f"{flag(one)} and {flag(other)} do not go together, as in Megatron"
    if job["no_load_optim"] and not job["finetune"] and _begins_with_others(job):
        another = ", with another --save" if _saves_where_it_loads(job) else ""
        yield (
            f"--no-load-optim: not supported where {job['load']} has a checkpoint, a run goes on "
            "with the optimizer too: leave it out; instead: --finetune, which takes weights alone "
            f"and begins at step 0{another}"
        )
    if job["finetune"] and _saves_where_it_loads(job):
        yield (
            f"--finetune with --save that is --load, {job['load']}: not supported, each start "
            "would begin at step 0 with what the one before has saved; instead: another --save"
        )
    if job["overlap_param_gather"] and not job["overlap_grad_reduce"]:
        yield "--overlap-param-gather wants --overlap-grad-reduce, as Megatron does"
    if job["decoupled_min_lr"] is not None and job["decoupled_lr"] is None:
        yield "--decoupled-min-lr wants --decoupled-lr: Megatron does not use it alone"
    if job["lr_decay_style"] == "WSD" and not any(job[name] for name in _WSD_LENGTHS):
        yield "--lr-decay-style WSD wants --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    if not _is_split(job["split"] or SPLIT):
        yield f"--split {job['split']}: wanted one to three numbers with commas between"
    for name in ("min_lr", "lr_warmup_init"):
        if job["lr"] is not None and job[name] > job["lr"]:
            yield f"{flag(name)} {job[name]:g} is more than --lr {job['lr']:g}"


def _ramp_problems(job: Owned) -> Iterator[str]:
    if job[RAMP] is None:
        return
    told, whole = f"{flag(RAMP)} {' '.join(job[RAMP])}", job["global_batch_size"]
    if job["train_samples"] is None:
        yield f"{flag(RAMP)} wants --train-samples, as Megatron does"
    try:
        start, increment, samples = (int(word) for word in job[RAMP])
    except ValueError:
        yield f"{told}: wanted three whole numbers, START INCREMENT SAMPLES"
        return
    if min(start, increment, samples) <= 0:
        yield f"{told}: wanted numbers more than 0"
    elif whole is not None and (start >= whole or (whole - start) % increment):
        yield (
            f"{told}: wanted an increment that leads from START to more, to --global-batch-size "
            f"{whole}"
        )


def data_problems(job: Owned) -> Iterator[str]:
    """What of a job's data is not on this host's disks, or not whole, or too little. What a path
    itself names is the script's to read."""
    if job["mock_data"]:
        return
    for name, words in _named_data(job):
        for word in words:
            if "://" not in word and not is_number(word) and not Path(word).exists():
                try:
                    held = read_indexed_data(Path(word.strip()))
                except ConfigError as error:
                    yield f"{flag(name)}: {error}"
                else:
                    yield from _empty_shares(job, name, word, held.sequences)
    for name in ("data_args_path", "per_split_data_args_path"):
        if job[name] is not None and "://" not in job[name] and not Path(job[name]).is_file():
            yield f"{flag(name)} {job[name]}: there is no such file"


def _empty_shares(job: Owned, name: str, word: str, sequences: int) -> Iterator[str]:
    """Megatron's `_get_num_epochs` ends for no part that has a share and no sequence."""
    parts = dict(zip(PARTS, shares(job), strict=True)) if name in _SPLIT_BY_SHARES else {}
    for part, share in parts.items():
        first, end = share_of(sequences, [*parts.values()], part)
        if share and first == end:
            yield (
                f"{flag(name)} {word}: of its {sequences} sequences --split "
                f"{job['split'] or SPLIT} leaves none for {part}, in which Megatron would look for "
                "samples for ever; wanted a larger share, or 0"
            )


def _named_data(job: Owned) -> Iterator[tuple[str, Sequence[str]]]:
    """Prefixes and weights, by the option that has them, or whose file has."""
    yield from ((name, job[name] or ()) for name in LISTS)
    with suppress(OSError, ValueError):  # of a file that cannot be read, the script tells
        if job["data_args_path"] is not None:
            yield "data_args_path", Path(job["data_args_path"]).read_text("utf-8").split()
    with suppress(OSError, ValueError):
        if job["per_split_data_args_path"] is not None:
            named = json.loads(Path(job["per_split_data_args_path"]).read_text("utf-8"))
            for each in map(named.get, PARTS):
                words = each.split() if isinstance(each, str) else each or ()
                yield "per_split_data_args_path", [*map(str, words)]


def ramp_of(words: Sequence[str] | None) -> RampupSection | None:
    """What --rampup-batch-size says that has no problem."""
    if words is None:
        return None
    start, increment, samples = (int(word) for word in words)
    return RampupSection(start=start, increment=increment, samples=samples)


def steps_of(train_samples: int, global_batch: int, ramp: Sequence[str] | None) -> int:
    """How many steps a job has that counts samples: as many as are whole, but in a ramp-up all that
    begin by then (`update_train_iters`). ramp: the words of --rampup-batch-size."""
    train = TrainSection(steps=1, global_batch=global_batch, rampup=ramp_of(ramp))
    after = first_step_after(train)
    if train_samples < (end := samples_before(train, after)):
        return step_of(train, train_samples) + 1
    return after + (train_samples - end) // global_batch


def lacks_checkpoint(job: Owned) -> bool:
    """Whether there is none where --load says; Megatron begins with initial values then."""
    return job["load"] is not None and not (Path(job["load"]) / TRACKER_FILE).is_file()


def loads(job: Owned) -> bool:
    """Whether a run loads what --load has when it starts: something, or what is saved there."""
    if job["finetune"] or job["load"] is None:
        return False
    return not lacks_checkpoint(job) or _saves_where_it_loads(job)


def _begins_with_others(job: Owned) -> bool:
    """Whether there is a checkpoint where --load says, other than one that a run saves there."""
    if job["load"] is None or lacks_checkpoint(job):
        return False
    return not (_saves_where_it_loads(job) and (Path(job["load"]) / OWNER_FILE).exists())


def _saves_where_it_loads(job: Owned) -> bool:
    load, save = job["load"], job["save"]
    return None not in (load, save) and Path(load).resolve() == Path(save).resolve()


def weights_of(job: Owned) -> tuple[str, str] | None:
    """Whose weights a new run takes, and the option that says so: of what --load has with
    --finetune, else of --pretrained-checkpoint, where --load has nothing."""
    if job["finetune"] and job["load"] is not None and not lacks_checkpoint(job):
        return job["load"], "load"
    pretrained = job["pretrained_checkpoint"]
    if pretrained is None or not (job["load"] is None or lacks_checkpoint(job)):
        return None
    return pretrained, "pretrained_checkpoint"


# ---- keys


def derived_values(job: Owned) -> dict[KeyPath, Derived]:
    """The run file's values that follow from a job without problems."""
    found = {key: Derived(job[name], job.source(name), _AT) for key, name in _OPTION_OF.items()}
    for part in (_length(job), _schedule(job), _evaluation(job), _checkpoints(job), _data(job)):
        found |= {
            key: Derived(value, source, _AT, may_differ=key in MAY_DIFFER)
            for key, value, source in part
        }
    return found


_AT = ("model", "args")
_Values = Iterator[tuple[KeyPath, Any, str]]


def _length(job: Owned) -> _Values:
    steps, names = job["train_iters"], ["train_iters"]
    if steps is None:
        steps = steps_of(job["train_samples"], job["global_batch_size"], job[RAMP])
        names = ["train_samples", "global_batch_size", RAMP]
    yield ("train", "steps"), steps, job.source(*names)
    ramp = ramp_of(job[RAMP])
    if ramp is None:
        yield ("train", "rampup"), None, f"no {flag(RAMP)}"
    else:
        yield ("train", "rampup"), ramp.model_dump(), job.source(RAMP)
    if job["exit_interval"]:
        yield ("train", "stop_every_steps"), job["exit_interval"], job.source("exit_interval")
    if job["ddp_bucket_size"] is not None:
        yield ("train", "bucket_elements"), job["ddp_bucket_size"], job.source("ddp_bucket_size")


def schedule_in_samples(job: Owned) -> dict[str, float]:
    """What Megatron's scheduler counts in, under the names in its state: a step is a whole global
    batch of samples, also while the batch of a step is smaller. A job that loads it wants its own
    again, to the last digit."""
    unit, scale = _unit(job)
    length, decay = job[f"train_{unit}"] * scale, job[f"lr_decay_{unit}"]
    decay = length if decay is None else decay * scale
    fraction = job["lr_warmup_fraction"]
    warmup = job[f"lr_warmup_{unit}"] * scale if fraction is None else fraction * decay
    return {"lr_warmup_steps": warmup, "lr_decay_steps": decay, "wd_incr_steps": length}


def _unit(job: Owned) -> tuple[str, int]:
    """What the job counts its length in, and how many samples that is."""
    return ("samples", 1) if job["train_iters"] is None else ("iters", job["global_batch_size"])


_WSD_LENGTHS = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


def _schedule(job: Owned) -> _Values:
    (unit, _), batch, samples = _unit(job), job["global_batch_size"], schedule_in_samples(job)
    decay, warmup = f"lr_decay_{unit}", f"lr_warmup_{unit}"
    given = decay if job[decay] is not None else f"train_{unit}"
    warmed_by = [warmup]
    if job["lr_warmup_fraction"] is not None:
        warmed_by = ["lr_warmup_fraction", given]
    used = ("global_batch_size",) if unit == "samples" else ()
    yield ("schedule", "decay_steps"), samples["lr_decay_steps"] / batch, job.source(given, *used)
    warmup_samples = samples["lr_warmup_steps"]
    with_batch = used if warmup_samples else ()
    yield ("schedule", "warmup_steps"), warmup_samples / batch, job.source(*warmed_by, *with_batch)
    if job["lr_decay_style"] == "WSD":
        tail, scale = f"lr_wsd_decay_{unit}", _unit(job)[1]
        steps = job[tail] * scale / batch
        yield ("schedule", "wsd_decay_steps"), steps, job.source(tail, *used)
        style = "lr_wsd_decay_style"
        yield ("schedule", "wsd_decay_style"), job[style], job.source(style)


def _evaluation(job: Owned) -> _Values:
    names = ("eval_interval", "eval_iters")
    why = _unvalidated(job)
    if why is not None:
        yield ("eval",), None, why
    else:
        yield ("eval", "every_steps"), job["eval_interval"], job.source(names[0])
        yield ("eval", "steps"), job["eval_iters"], job.source(names[1])


_SPLIT_BY_SHARES = ("data_path", "data_args_path", "mock_data")


def _unvalidated(job: Owned) -> str | None:
    """Which option makes that there is nothing to evaluate; None where there is."""
    if not job["eval_iters"]:
        return job.source("eval_iters")
    if any(job[name] for name in _SPLIT_BY_SHARES) and shares(job)[1] == 0:
        return job.source("split")
    if job["train_data_path"] and not job["valid_data_path"]:
        return f"{flag('train_data_path')} without {flag('valid_data_path')}"
    return None


def shares(job: Owned) -> list[float]:
    """Of training, validation and test, as `parse_and_normalize_split` reads them."""
    return [*_given_shares(job), 0.0, 0.0, 0.0][:3]


def _is_split(text: str) -> bool:
    """Whether there is one number for each share, at most, as Megatron finds them in a text."""
    found = re.findall(r"[.0-9]+", text)
    return 0 < len(found) < 4 and all(re.fullmatch(r"\d+\.?\d*|\.\d+", one) for one in found)


def _given_shares(job: Owned) -> list[float]:
    return [float(share) for share in re.findall(r"[.0-9]+", job["split"] or SPLIT)]


def _checkpoints(job: Owned) -> _Values:
    if job["save"] is not None:
        yield ("checkpoint", "directory"), job["save"], job.source("save")
        yield ("checkpoint", "every_steps"), job["save_interval"], job.source("save_interval")
        yield ("checkpoint", "keep"), None, job.source("save")  # Megatron removes none
    if loads(job):
        yield ("checkpoint", "load"), job["load"], job.source("load")
    if (weights := weights_of(job)) is not None:
        path, option = weights
        yield ("checkpoint", "weights"), path, job.source(option)


def _data(job: Owned) -> _Values:
    """Where --data-path says all of it; else it is the script's matter alone."""
    blend = blend_of(job["data_path"] or [])
    if blend is None:
        sources = ("data_path", "mock_data", *LISTS, "data_args_path", "per_split_data_args_path")
        told = [job.words[name] for name in sources if name in job.words]
        yield ("data",), None, told[0] if told else "no --data-path"
        return
    source = job.source("data_path")
    if len(blend) == 1:
        yield ("data", "prefix"), blend[0]["prefix"], source
    else:
        yield ("data", "blend"), blend, source
    split = ",".join(f"{Decimal(f'{share:.15g}'):f}" for share in _given_shares(job))
    yield ("data", "split"), split, job.source("split")
    yield ("data", "seed"), job["seed"], job.source("seed")


def blend_of(words: Sequence[str]) -> list[dict[str, Any]] | None:
    """Weights and prefixes as `get_blend_from_list` reads them; None for none, for several without
    weights, which Megatron weighs by their sizes, and for those in object stores."""
    if any("://" in word for word in words):
        return None
    if len(words) == 1:
        return [{"prefix": words[0].strip(), "weight": 1.0}]
    if not words or len(words) % 2:
        return None
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return None
    pairs = zip(words[1::2], weights, strict=True)
    return [{"prefix": prefix.strip(), "weight": weight} for prefix, weight in pairs]
