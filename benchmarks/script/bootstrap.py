"""One process of a plain run: the shim for CUDA, then the script, unchanged, as `__main__`.

torchrun --nproc-per-node 2 -m benchmarks.script.bootstrap pretrain_gpt.py ARGUMENTS
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

SCALARS = "scalars.jsonl"


class ScalarFile:
    """Stands for tensorboard's SummaryWriter: scalars with all their digits, one a line."""

    def __init__(self, log_dir: str, **_options: Any) -> None:
        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / SCALARS).open("a", encoding="utf-8", buffering=1)

    def add_scalar(self, name: str, value: Any, step: Any, **_options: Any) -> None:
        entry = {"name": name, "step": int(step), "value": float(value)}
        self._file.write(json.dumps(entry) + "\n")

    def add_text(self, *_args: Any, **_options: Any) -> None:
        """The arguments, which the log has too."""

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _pretend_cuda() -> None:
    """As many devices as processes: the script refuses to begin without."""
    import torch

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.get_device_capability = lambda *_args: (9, 0)
    cuda.get_device_properties = lambda *_args: types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, name="CPU"
    )
    cuda.memory_stats = lambda *_args, **_options: {}
    cuda.set_stream = cuda.reset_peak_memory_stats = lambda *_args, **_options: None


def _stand_for_tensorboard() -> None:
    module: Any = types.ModuleType("torch.utils.tensorboard", "Stands for tensorboard.")
    module.SummaryWriter = ScalarFile
    sys.modules[module.__name__] = module


def _keep_adam_loadable() -> None:
    """An Adam whose state can be saved and loaded at any time, as Transformer Engine's can.

    Where that is missing megatron-core asks torch's for a step count before there is one, wants
    it among the tensors that it loads, where it never is, or is that of before, and gives all
    parameters one tensor to count in, which then advances once a parameter.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from liver_hpc.world.megatron import transformer_engine_is_here

    if transformer_engine_is_here():
        return

    class LoadableAdam(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            for parameter in (one for group in self.param_groups for one in group["params"]):
                state = self.state[parameter]
                for moment in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(moment, torch.zeros_like(parameter.data))
                state.setdefault("step", torch.tensor(0.0))
            return dict(super().state_dict())

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["step"] = state["step"].clone()

    torch.optim.AdamW = LoadableAdam  # type: ignore[misc]
    plain_get = DistributedOptimizer._get_main_param_and_optimizer_states
    plain_set = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_all_but_count(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():  # in fp32 a main parameter is a view of one that is trained
            plain_set(self, parameter, {**tensors, "step": plain_get(self, parameter)["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_all_but_count


def _skip_what_is_for_cuda() -> None:
    """Of what the script does before it builds the model.

    It warms compiled functions up on random tensors, here of the generator that the first values
    of the model come from: those would depend on the layout. Older releases compile kernels.
    """
    with contextlib.suppress(ModuleNotFoundError):
        initialize: Any = importlib.import_module("megatron.training.initialize")
        initialize._warmup_jit_function = lambda **_options: None
        kernels: Any = importlib.import_module("megatron.legacy.fused_kernels")
        kernels.load = lambda _args: None


def _give_index_helpers() -> None:
    """The compiled helpers of datasets: the checkout's, where it was built, else the wheel's."""
    package: Any = importlib.import_module("megatron.core.datasets")
    wheel = importlib.metadata.distribution("megatron-core")
    package.__path__.append(str(wheel.locate_file("megatron/core/datasets")))
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = lambda: None


def _run_as_main(script: Path, code: Any) -> None:
    """Runs it. Processes that it spawns, as checkpoints do, import this module, not the script:
    nothing stands for CUDA in those."""
    module: Any = types.ModuleType("__main__")
    module.__file__, module.__spec__ = str(script), sys.modules["__main__"].__spec__
    sys.modules["__main__"] = module
    exec(code, vars(module))


def main() -> None:
    """Runs `argv[1]` with the arguments that follow it."""
    sys.argv[:] = sys.argv[1:]
    script = Path(sys.argv[0]).absolute()
    sys.path[0] = str(script.parent)
    code = compile(script.read_bytes(), str(script), "exec")
    import torch

    from liver_hpc.recipes.megatron_lm import cpu_layers
    from liver_hpc.world import cpu_shim

    torch.set_num_threads(1)
    cpu_shim.install()
    with cpu_shim.import_only_triton():
        cpu_layers.install()
        _pretend_cuda()
        _stand_for_tensorboard()
        _keep_adam_loadable()
        _skip_what_is_for_cuda()
        _give_index_helpers()
        _run_as_main(script, code)
    if torch.distributed.is_initialized():  # else gloo's threads may abort an interpreter that ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
