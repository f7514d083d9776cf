"""The arguments of a Megatron-LM job, without torch: what the run file gets from them, what is said
of them, and whether Megatron's own parser makes the same of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liver_hpc.config.completion import Derived
from liver_hpc.config.problems import KeyPath
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.megatron_lm.judgement import notes_of_options, refused_words
from liver_hpc.recipes.megatron_lm.owned import (
    LISTS,
    NUMBERS,
    RAMP,
    SWITCHES,
    Owned,
    data_problems,
    derived_values,
    flag,
    lacks_checkpoint,
    loads,
    problems_of,
    schedule_in_samples,
    shares,
    steps_of,
    weights_of,
)
from liver_hpc.recipes.megatron_lm.words import options_of


def derived_from(words: Sequence[str]) -> Mapping[KeyPath, Derived]:
    """The run file's values that follow from a job's arguments, by key.

    Raises ConfigError with every argument that an elastic run cannot have, and every one that is
    missing.
    """
    refused = refused_words(words)
    try:
        job = Owned.of(words)
    except ConfigError as error:
        raise ConfigError(*refused, *error.args) from None
    if problems := [*refused, *problems_of(job)]:
        raise ConfigError(*problems)
    return derived_values(job)


def notes_of(words: Sequence[str]) -> list[str]:
    """What a user should know of a job that has no problem."""
    job, notes = Owned.of(words), notes_of_options(words)
    if lacks_checkpoint(job):
        until = (
            "as long as there is none" if loads(job) else "also where one comes before it starts"
        )
        missing = f"--load {job['load']} has no checkpoint yet"
        weights = weights_of(job)
        begins = "at step 0" if weights is None else f"with the weights of {weights[0]}"
        notes.append(f"model.args: {missing}: the run begins {begins}, {until}")
    if job["no_load_optim"] and not job["finetune"]:
        own = "from a checkpoint of its own a run goes on with the optimizer too"
        notes.append(f"model.args: --no-load-optim: {own}")
    return notes


def check_data_of(words: Sequence[str]) -> None:
    """Raises ConfigError with what of a job's data is not there, or not whole."""
    if problems := [*data_problems(Owned.of(words))]:
        raise ConfigError(*(f"model.args: {problem}" for problem in problems))


def schedule_to_load(words: Sequence[str]) -> Mapping[str, Any]:
    """What the state of Megatron's scheduler must be in a checkpoint that a job loads; nothing
    where the job overrides it."""
    if any(option.name == "override_opt_param_scheduler" for option in options_of(words)):
        return {}
    job = Owned.of(words)
    rates = {"max_lr": job["lr"], "min_lr": job["min_lr"], "lr_decay_style": job["lr_decay_style"]}
    decay = {"start_wd": job["weight_decay"], "end_wd": job["weight_decay"]}
    return rates | decay | schedule_in_samples(job)


def agreement(words: Sequence[str], parsed: Mapping[str, Any]) -> list[str]:
    """What Megatron's parser has otherwise than the run file has it from the words: a script may
    have defaults of its own. parsed: its namespace, before or after `validate_args`."""
    job, problems = Owned.of(words), []
    for name in (*NUMBERS, *SWITCHES, *LISTS, RAMP):
        if name not in parsed or _same(job, name, parsed[name]):
            continue
        value = parsed[name]
        told = " ".join(map(str, value)) if isinstance(value, list) else value
        problems.append(
            f"{flag(name)}: the script has {told}, the run file {job[name]} by {job.source(name)}; "
            f"write {flag(name)} {told} into model.args"
        )
    return problems


def _same(job: Owned, name: str, value: Any) -> bool:
    if name == "split":
        return shares(job) == shares(Owned({"split": value}, {}))
    if name == "train_iters" and job["train_samples"]:  # which Megatron counts in steps later
        steps = steps_of(job["train_samples"], job["global_batch_size"], job[RAMP])
        return value in (None, steps)
    if name == RAMP and value is not None:  # of numbers, where a script has it as a default
        value = [*map(str, value)]
    if name == "eval_interval" and not job["eval_iters"]:  # which says how often nothing is done
        return True
    return bool(job[name] == value) or (not job[name] and not value)
