"""What all peers train: the recipe's module at tp1 pp1, torch's Adam, whole batches shared out.

Runs in a peer's worker process. Nothing of liver_hpc runs here but the recipe's model and samples,
and what lets megatron-core run on a CPU at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.events import Step
from benchmarks.steady_state.plain import filled_module
from liver_hpc.config.load import load_run
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.world.device import Device, open_device

LIMIT = timedelta(seconds=120)


def open_worker() -> Device:
    """First of all in a worker: its device."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return open_device(int(os.environ.get("LOCAL_RANK", "0")))


class StepLog:
    """The file to which this process appends its steps."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"steps-{os.getpid()}"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def add(self, step: Step) -> None:
        """In one write, so that a reader sees whole lines."""
        os.write(self._file, step.line().encode())


class Training:
    """Model and optimizer over the default group, one data-parallel replica a process.

    The module is built with Megatron's groups of one worker; the peer's own DDP wraps it.
    """

    def __init__(self, directory: Path) -> None:
        from megatron.core import parallel_state, tensor_parallel

        config = load_run(directory / "run.yaml")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
        self.recipe = load_run_recipe(config, directory)
        self.recipe.open(directory)
        self._layout = Layout(1, 1, dist.get_world_size())
        self._at = self._layout.coordinate(dist.get_rank())
        self.module, _ = filled_module(self.recipe, self._layout)
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def state(self) -> dict[str, Any]:
        """Parameters and both moments; the tensors are those that train."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; copies."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])

    def backward(self, model: Any, step: int, member: int, members: int) -> torch.Tensor:
        """Gradients of this member's part of a global batch, averaged by `model`'s own DDP with
        the last micro-batch; returns the part's mean loss."""
        samples = self.recipe.batch(step)
        share = len(samples) // members
        parts = _parts(
            samples[member * share : (member + 1) * share], self.recipe.config.train.micro_batch
        )
        total = torch.zeros(())
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            with nullcontext() if is_last else _unsynchronised(model):
                read = self.recipe.fetch(part, self._layout, self._at)
                output, mean_loss = self.recipe.loss(model, read)
                loss, _ = mean_loss(output)
                (loss / len(parts)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / len(parts)
        return total

    def clip(self) -> None:
        """As the run's optimizer section says."""
        limit = self.recipe.config.optimizer.clip_grad
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)


class Replicated:
    """A `Training` under torch's DDP over the default group, all of whose ranks contribute.

    `world` is drawn by rank 0, the same on all, and new for every group.
    """

    def __init__(self, training: Training, log: StepLog) -> None:
        self._training = training
        self._log = log
        self._model = torch.nn.parallel.DistributedDataParallel(
            training.module, find_unused_parameters=False, init_sync=False
        )
        drawn = torch.tensor(time.time_ns())
        dist.broadcast(drawn, 0)
        self._world = int(drawn)

    def step(self, number: int, wish: bool = False) -> bool:
        """One step; whether any rank wished for something by then, the same on all ranks."""
        training, started_s = self._training, time.time()
        training.optimizer.zero_grad()
        loss = training.backward(self._model, number, dist.get_rank(), dist.get_world_size())
        training.clip()
        training.optimizer.step()
        said = torch.stack([loss, torch.tensor(float(wish))])
        dist.all_reduce(said)
        mean = float(said[0]) / dist.get_world_size()
        self._log.add(
            Step(number, self._world, dist.get_world_size(), started_s, time.time(), mean)
        )
        return bool(said[1] > 0)


def _parts(samples: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def _unsynchronised(model: Any) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = model.no_sync()
    return found
