"""What Megatron-LM's own parser says: `python megatron_parser.py WORD...` with a checkout first on
Python's path, as JSON. A process of its own: the checkout's megatron-core takes the wheel's place.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
import typing
from typing import Any

from liver_hpc.world import cpu_shim


def imported(name: str) -> Any:
    with cpu_shim.import_only_triton():
        return importlib.import_module(name)


def validated(arguments: Any, words: list[str]) -> dict[str, Any]:
    """The namespace as `pretrain` has it, validated."""
    sys.argv = ["pretrain_gpt.py", *words]
    arguments._print_args = lambda *_args: None
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    return vars(args)


def schedule(args: dict[str, Any]) -> dict[str, Any]:
    """What `get_optimizer_param_scheduler` gives the scheduler, in samples."""
    training = imported("megatron.training.training")
    given: dict[str, Any] = {}
    training.get_args = lambda: types.SimpleNamespace(**args)
    training.OptimizerParamScheduler = lambda _optimizer, **options: given.update(options)
    training.get_optimizer_param_scheduler(None)
    return given


def main(words: list[str]) -> None:
    if not hasattr(typing, "override"):  # Python 3.11, for which 0.19 is not made
        typing.override = lambda function: function  # type: ignore[attr-defined]
    for name in ("six", "regex"):  # of tokenizers that are not used here
        sys.modules.setdefault(name, types.ModuleType(name)).string_types = (str,)  # type: ignore[attr-defined]
    cpu_shim.install()
    arguments = imported("megatron.training.arguments")
    judgement = imported("liver_hpc.recipes.megatron_lm.judgement")
    ours = imported("liver_hpc.recipes.megatron_lm.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = [action for action in parser._actions if action.dest != "help"]
    args = validated(arguments, words)
    before = {name: vars(parser.parse_args(given)) for name, given in (("", []), ("job", words))}
    found = {
        "options": [[action.dest, action.option_strings] for action in actions],
        "judged": judgement.judged(before["job"], before[""]),
        "agreement": ours.agreement(words, args),
        "schedule": schedule(args),
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
