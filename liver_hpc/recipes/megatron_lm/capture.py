"""What a script hands to Megatron's `pretrain`, for each layout.

The script is run as `__main__` up to that call, and no further: so it may build what it hands over
in any way it likes. Its arguments are those of the job, but for the layout's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import num_microbatches_calculator, rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from liver_hpc.config.schema import TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ramp import batch_of, step_of
from liver_hpc.recipes.megatron_lm import checkout, pretrain_call, validation
from liver_hpc.recipes.megatron_lm.alone import alone, heard
from liver_hpc.recipes.megatron_lm.arguments import agreement
from liver_hpc.recipes.megatron_lm.judgement import judged, without_layout
from liver_hpc.recipes.megatron_lm.options import ScriptOptions
from liver_hpc.recipes.megatron_lm.owned import ramp_of
from liver_hpc.recipes.megatron_lm.words import number_of, options_of
from liver_hpc.world import cpu_shim, module_globals, thread

_KEPT_QUIET = (
    "_set_tensorboard_writer",
    "_set_wandb_writer",
    "_set_one_logger",
    "_set_adlr_autoresume",
    "_set_signal_handler",
    "_set_telemetry",
    "init_num_microbatches_calculator",
)
"""What `set_global_variables` does besides, and a worker of ours must not, or does itself."""
_GIVEN = "_GLOBAL_"
"""How the names of Megatron's global variables begin."""
_CAPTURED = "__captured__"
_NAMING_DATA = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")
"""Options whose file says which data there is, and which the script reads as it makes datasets."""


class _Reached(BaseException):
    """The script has called `pretrain`. No Exception: nothing on the way is to catch it."""


@dataclass(frozen=True)
class Captured:
    """What a script hands over in one layout.

    args: Megatron's arguments, validated. model_config, model_builder: from 0.19 on, where no
    provider is given. variables: Megatron's global variables as they are then.
    """

    args: Any
    datasets_provider: Callable[..., Any]
    forward_step: Callable[..., Any]
    model_type: Any
    model_provider: Callable[..., Any] | None
    model_config: Any
    model_builder: Callable[..., Any] | None
    embedding_ranks: Callable[..., Any] | None
    variables: dict[str, Any] = field(repr=False)


class Script:
    """A script of a checkout that is first on Python's path; one a process.

    The vocabulary is padded for the tensor-parallel ranks that the job has by its own arguments:
    another number of them must not make another model.
    Raises ConfigError where it is not there, or megatron-core is another.
    """

    def __init__(self, options: ScriptOptions) -> None:
        checkout.check(options)
        checkout.check_imported(options)
        self._path, (self._words, _) = options.script, without_layout(options.words)
        self._own_tp = number_of(options.words, "tensor_model_parallel_size") or 1
        self._lock = threading.Lock()
        self._captured: dict[Layout, Captured] = {}
        self._tokenizer: Any = None
        self._padded_vocabulary: int | None = None
        with _imports(self._path):
            self.text = self._path.read_bytes()
            self.lists = _lists(options.words)
            self._code = compile(self.text, str(self._path), "exec")
            self.training: Any = importlib.import_module("megatron.training.training")
            self.arguments: Any = importlib.import_module("megatron.training.arguments")
            self.variables: Any = importlib.import_module("megatron.training.global_vars")
        for module in (self.variables, num_microbatches_calculator, rerun_state_machine):
            module_globals.answer_per_world(module)
        vars(self.arguments)["_print_args"] = lambda *_args: None
        self._defaults = validation.take_over(self.arguments)
        self._parse, self._validate = self.arguments.parse_args, self.arguments.validate_args
        self._functions = pretrain_call.functions_of(self.training)

    @property
    def identity(self) -> object:
        """What is the same where it does the same: all that it is, and gets, but the layout."""
        return megatron.core.__version__, self._path, self.text, self._words, self.lists

    def at(self, layout: Layout) -> Captured:
        """Runs the script, where that has not been done for the layout. Not collective.

        Raises ConfigError where the script does not get as far as `pretrain`.
        """
        with self._lock:
            if layout not in self._captured:
                self._captured[layout] = self._capture(layout)
            return self._captured[layout]

    def answer_for(self, groups: Any, layout: Layout, at: Coordinate) -> Captured:
        """Makes Megatron's globals of a world those of the script there; once for its groups."""
        captured = self.at(layout)
        mine = module_globals.namespace_of(groups, self.variables)
        if mine[f"{_GIVEN}ARGS"] is not None:
            return captured
        args = copy.copy(captured.args)
        args.rank = layout.rank(at)
        # That way of sending goes over the default group, which does not exist here.
        args.overlap_p2p_comm = False
        args.timing_log_level = 0  # else the script's timers wait for the whole device
        mine.update(captured.variables)
        mine[f"{_GIVEN}ARGS"], mine[f"{_GIVEN}TIMERS"] = args, None
        mine["_set_timers"](args)
        mine[_CAPTURED] = captured
        batches = module_globals.namespace_of(groups, num_microbatches_calculator)
        batches["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"] = _MicroBatches(args, layout.dp)
        reruns = module_globals.namespace_of(groups, rerun_state_machine)
        reruns["_GLOBAL_RERUN_STATE_MACHINE"] = _NoReruns(mode=RerunMode.DISABLED)
        return captured

    def check(self, layout: Layout) -> None:
        """Raises ConfigError for arguments that Megatron's parser knows and an elastic run cannot
        have, and for what the script makes otherwise than the run file has it."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        self.arguments.add_megatron_arguments(parser)
        captured = self.at(layout)
        parsed, plain = (vars(parser.parse_known_args(w)[0]) for w in (self._words, []))
        unset = {name for name, value in parsed.items() if value is None}
        parsed |= {name: self._defaults[name] for name in unset & self._defaults.keys()}
        problems = judged(parsed, plain)
        by_words = self._by_words_alone(layout, dict(self._defaults))
        of_plain = {name: by_words[name] for name in plain if name in by_words}
        problems += [f"the script sets {each}" for each in judged(vars(captured.args), of_plain)]
        problems += validation.refused(captured.args)
        problems += agreement(self._words, vars(captured.args))
        if problems:
            raise ConfigError(*(f"model.args: {problem}" for problem in problems))

    def captured_of(self, groups: Any) -> Captured:
        """What was captured for a world."""
        captured: Captured = module_globals.namespace_of(groups, self.variables)[_CAPTURED]
        return captured

    def arguments_of(self, groups: Any) -> Any:
        """Megatron's arguments of a world; they are its own."""
        return module_globals.namespace_of(groups, self.variables)[f"{_GIVEN}ARGS"]

    # ---- the run of the script

    def _by_words_alone(self, layout: Layout, defaults: dict[str, Any]) -> dict[str, Any]:
        """What Megatron's parser has there by the words and a script's `args_defaults`, where the
        script changes nothing."""
        with (
            thread.groups_in_use(types.SimpleNamespace()),
            self._as_started(layout),
            _imports(self._path),
            self._arguments_taken(),
            contextlib.redirect_stdout(heard(sys.stdout, lambda _: None)),
        ):
            args = self._parse(ignore_unknown_args=True)
            return dict(vars(self._validate(args, defaults)))

    def _capture(self, layout: Layout) -> Captured:
        world = types.SimpleNamespace()  # nobody's: Megatron's globals while the script runs
        mine = module_globals.namespace_of(world, self.variables)
        for name in _KEPT_QUIET:
            if name in mine:
                mine[name] = lambda *_args, **_options: None
        mine["_build_tokenizer"] = self._with_one_tokenizer(mine)
        with (
            thread.groups_in_use(world),
            self._as_started(layout),
            _imports(self._path),
            self._arguments_taken(),
        ):
            given, main = self._run()
            if mine[f"{_GIVEN}ARGS"] is None:  # before 0.18, pretrain itself does that
                args = self.arguments.parse_args(given.get("extra_args_provider"))
                self.arguments.validate_args(args, dict(given.get("args_defaults") or {}))
                mine["set_global_variables"](args)
            args = mine[f"{_GIVEN}ARGS"]
            provider = given.get("model_provider") or given.get("model_provider_func")
            config = None if provider else given["cfg_container"].model
            builder = None if config is None else pretrain_call.builder_of(config, main)
            problems = pretrain_call.refused(given, args, builder)
            if problems := [*problems, *pretrain_call.replaced(self.training, self._functions)]:
                raise ConfigError(*(f"model.script: {self._path} {each}" for each in problems))
        validation.complete(args)
        return Captured(
            args=args,
            datasets_provider=_first(given, "train_valid_test_dataset"),
            forward_step=_first(given, "forward_step"),
            model_type=given["model_type"],
            model_provider=provider,
            model_config=config,
            model_builder=builder,
            embedding_ranks=given.get("get_embedding_ranks"),
            variables={name: value for name, value in mine.items() if name.startswith(_GIVEN)},
        )

    def _run(self) -> tuple[dict[str, Any], types.ModuleType]:
        """Runs the script; the arguments of `pretrain` that it gives, by name, and its module."""
        package: Any = importlib.import_module("megatron.training")
        plain, given = self.training.pretrain, dict[str, Any]()
        signature = inspect.signature(plain)

        def pretrain(*args: Any, **options: Any) -> None:
            bound = signature.bind(*args, **options).arguments.items()
            defaults = {name: each.default for name, each in signature.parameters.items()}
            given.update({name: value for name, value in bound if value is not defaults[name]})
            raise _Reached

        package.pretrain = self.training.pretrain = pretrain
        module = types.ModuleType("__main__")
        module.__file__ = str(self._path)
        try:
            exec(self._code, vars(module))
        except _Reached:
            return given, module
        finally:
            package.pretrain = self.training.pretrain = plain
        raise ConfigError(f"{self._path} ends without a call of megatron.training.pretrain")

    @contextlib.contextmanager
    def _arguments_taken(self) -> Iterator[None]:
        """Raises ConfigError where the arguments are not; argparse says why, and exits."""
        said, stderr = list[str](), sys.stderr

        def hear(text: str) -> int:
            said.append(text)
            return stderr.write(text)

        try:
            with contextlib.redirect_stderr(heard(stderr, hear)):
                yield
        except SystemExit as error:
            why = "".join(said).strip().rpartition("\n")[2] or f"exit code {error.code}"
            raise ConfigError(f"model.args: {self._path} does not take them: {why}") from None

    @contextlib.contextmanager
    def _as_started(self, layout: Layout) -> Iterator[None]:
        """What the script sees of how it was started: arguments, and the first rank's place."""
        argv, environment = sys.argv, {"RANK": "0", "WORLD_SIZE": str(layout.workers)}
        before = {name: os.environ.get(name) for name in environment}
        sys.argv = [str(self._path), *self._words, *_layout_words(layout), *_worker_words()]
        os.environ.update(environment)
        try:
            with alone():
                yield
        finally:
            sys.argv = argv
            for name, value in before.items():
                if os.environ.get(name) != environment[name]:
                    continue  # another world's, by now
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _with_one_tokenizer(self, mine: dict[str, Any]) -> Callable[..., Any]:
        """Builds the tokenizer once, and pads the vocabulary as the job does."""
        build = mine["_build_tokenizer"]

        def once(args: Any) -> Any:
            if self._tokenizer is None:
                tp, args.tensor_model_parallel_size = args.tensor_model_parallel_size, self._own_tp
                self._tokenizer = build(args)
                args.tensor_model_parallel_size = tp
                self._padded_vocabulary = args.padded_vocab_size
            args.padded_vocab_size = self._padded_vocabulary
            mine[f"{_GIVEN}TOKENIZER"] = self._tokenizer
            return self._tokenizer

        return once


def _lists(words: Sequence[str]) -> dict[str, bytes]:
    """What the files have that name a job's data, by option; of one that cannot be read the script
    tells."""
    found = dict[str, bytes]()
    for option in options_of(words):
        if option.name in _NAMING_DATA:
            with contextlib.suppress(OSError):
                found[str(option)] = Path(*option.values).read_bytes()
    return found


def _first(given: dict[str, Any], beginning: str) -> Any:
    """The argument of `pretrain` whose name begins so: names differ between releases."""
    return next(value for name, value in given.items() if name.startswith(beginning))


def _layout_words(layout: Layout) -> list[str]:
    """A layout as Megatron-LM's arguments."""
    words = [
        *("--tensor-model-parallel-size", str(layout.tp)),
        *("--pipeline-model-parallel-size", str(layout.pp)),
        *("--context-parallel-size", str(layout.cp)),
        *("--expert-model-parallel-size", str(layout.ep)),
    ]
    if layout.vpp > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(layout.vpp)]
    return [*words, "--sequence-parallel"] if layout.sequence_parallel else words


def _worker_words() -> list[str]:
    """What holds for all workers of ours."""
    words = ["--use-distributed-optimizer"]
    if torch.cuda.is_available():
        return words
    return [*words, "--use-cpu-initialization", "--no-gradient-accumulation-fusion"]


@contextlib.contextmanager
def _imports(script: Path) -> Iterator[None]:
    """While modules of Megatron-LM are imported: some name triton, which CPUs do not have.

    Raises ConfigError for what the script's environment would need besides.
    """
    triton = (
        contextlib.nullcontext() if torch.cuda.is_available() else cpu_shim.import_only_triton()
    )
    try:
        with triton:
            yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.script: {script} wants the module {error.name}, which {sys.executable} lacks; "
            "install in this environment what the plain job has in its own"
        ) from error
    except ImportError as error:
        raise ConfigError(f"model.script: {script} cannot be imported: {error}") from error


# ---- objects that Megatron asks for


class _NoReruns(RerunStateMachine):  # type: ignore[misc]
    """Results are judged as without reruns; those of a rehearsal are garbage, and are not."""

    def validate_result(self, *args: Any, **options: Any) -> None:
        if not thread.here.rehearsing:
            super().validate_result(*args, **options)


class _MicroBatches:
    """Megatron's calculator of the batch size: how many micro-batches of a step the data-parallel
    rank with the most of them has."""

    def __init__(self, args: Any, dp: int) -> None:
        batch, self._micro_batch, self._dp = args.global_batch_size, args.micro_batch_size, dp
        ramp = ramp_of(args.rampup_batch_size)
        self._train = TrainSection(steps=1, global_batch=batch, rampup=ramp)
        self.update(0)

    def get(self) -> int:
        return int(self.num_micro_batches)

    def get_current_global_batch_size(self) -> int:
        return int(self.current_global_batch_size)

    get_current_running_global_batch_size = get_current_global_batch_size

    def get_micro_batch_size(self) -> int:
        return int(self._micro_batch)

    def update(self, consumed_samples: int, *_args: Any, **_options: Any) -> None:
        """To the step that begins after so many samples."""
        self.current_global_batch_size = batch = batch_of(
            self._train, step_of(self._train, consumed_samples)
        )
        self.num_micro_batches = self.num_microbatches = -(-batch // (self._micro_batch * self._dp))
