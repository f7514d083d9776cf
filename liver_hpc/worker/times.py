"""Times the parts of a run's model: `python -m liver_hpc.worker.times RUN.yaml TIMES.json`.

On one worker, with real micro-batches, forward and backward. By these times the layers of a
pipeline's stages can be chosen (`model.layer_times`). A process of its own because it imports
torch; `liver check-model --times` starts it.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from liver_hpc.config.load import load_run
from liver_hpc.errors import MODELS_ERRORS, ConfigError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.recipes.base import Recipe, load_recipe, put_first_on_path
from liver_hpc.recipes.specs import Answer

if TYPE_CHECKING:
    from liver_hpc.world.device import Device
    from liver_hpc.world.world import World

WARM, COUNTED = 2, 10
"""Micro-batches before the first that counts, and those that count."""
EMBEDDING, OUTPUT = "embedding", "output"
CONNECT_S = 30.0

Times = dict[str, float | list[float]]
"""The values of `model.layer_times`, in seconds."""


class Stopwatch:
    """To which part of the model time belongs: to the one that it was told of last."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._part: str | int | None = None
        self._since_s = 0.0
        self.forward = False
        self.spent_s: dict[str | int, float] = {}

    def turn_to(self, part: str | int | None) -> None:
        """From now on it belongs to this part; None: to none."""
        self._synchronize()
        now_s = time.perf_counter()
        if self._part is not None:
            spent_s = self.spent_s.get(self._part, 0.0) + now_s - self._since_s
            self.spent_s[self._part] = spent_s
        self._part, self._since_s = part, now_s


def hang_into(watch: Stopwatch, recipe: Recipe, module: Any) -> int:
    """Makes a model tell the stopwatch what it does; returns how many layers that has.

    In the backward a part begins when the gradient of its output is there, or when it is computed
    again. Raises ConfigError for a model without `embedding` and `decoder.layers`.
    """
    parts: list[Any] = [getattr(module, name, None) for name in ("embedding", "decoder")]
    embedding, decoder = parts
    if embedding is None or not hasattr(decoder, "layers"):
        raise ConfigError("the model has no `embedding` and `decoder.layers` to be timed")
    layers = [*decoder.layers]

    def on_output(part: str | int, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _gradient: watch.turn_to(part))
        if part == len(layers) - 1 and watch.forward:
            watch.turn_to(OUTPUT)

    def on_begin(part: str | int, *_of_module: Any) -> None:
        watch.turn_to(part)

    embedding.register_forward_hook(partial(on_output, EMBEDDING))
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(on_begin, number))
        layer.register_forward_hook(partial(on_output, number))
    # What comes last in the backward.
    next(embedding.parameters()).register_post_accumulate_grad_hook(lambda _: watch.turn_to(None))
    plain = recipe.loss

    def loss(model: Any, samples: Any) -> Any:
        watch.forward = True
        watch.turn_to(EMBEDDING)
        output, function = plain(model, samples)

        def of_output(values: Any) -> Any:
            watch.forward = False
            return function(values)

        return output, of_output

    recipe.loss = loss  # type: ignore[method-assign]
    return len(layers)


def layer_times(recipe: Recipe, world: World, device: Device) -> Times:
    """Seconds of a micro-batch: `model.layer_times`. One value for layers of one size."""
    (chunk,) = world.chunks
    module = chunk.module
    while hasattr(module, "module"):
        module = module.module
    stopwatch = Stopwatch(device.synchronize)
    layers = hang_into(stopwatch, recipe, module)
    each: list[dict[str | int, float]] = []
    for step in range(WARM + COUNTED):
        stopwatch.spent_s = {}
        world.forward_backward(step, most=1)
        stopwatch.turn_to(None)
        each.append(stopwatch.spent_s)
    medians = {
        part: median(spent_s[part] for spent_s in each[WARM:])
        for part in (EMBEDDING, *range(layers), OUTPUT)
    }
    of_layers = [medians[number] for number in range(layers)]
    sizes = {sum(p.numel() for p in layer.parameters()) for layer in module.decoder.layers}
    found = {
        EMBEDDING: medians[EMBEDDING],
        "layer": median(of_layers) if len(sizes) == 1 else of_layers,
        OUTPUT: medians[OUTPUT],
    }
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: Any) -> Any:
    """Three digits that say something."""
    return [*map(_rounded, value)] if isinstance(value, list) else float(f"{value:.3g}")


def main() -> int:
    """Leaves an `Answer`, also for a model that cannot be built or timed."""
    parser = argparse.ArgumentParser(prog="liver_hpc.worker.times", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("times", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    config = load_run(options.run)
    put_first_on_path(config)
    from liver_hpc.world.device import open_device
    from liver_hpc.world.network import Network

    device = open_device(0)  # before megatron is imported: it brings the stand-in for CUDA

    from liver_hpc.world.derive import Derivation
    from liver_hpc.world.groups import install_sentinel, lone_store
    from liver_hpc.world.megatron import prepare_process
    from liver_hpc.world.world import World

    install_sentinel(0)
    prepare_process(config.train.seed)
    try:
        recipe, layout = load_recipe(config), Layout(1, 1, 1)
        recipe.spec = Derivation(recipe).spec([layout])
        recipe.open(options.run.parent)
        world = World(recipe, RankMap(layout, (0,)), 0, 0, device)
        world.book.connect(Network(device, "127.0.0.1"), lone_store(), CONNECT_S)
        world.state.initialize(recipe.initial, config.train.seed)
        answer = Answer[Times](value=layer_times(recipe, world, device))
    except MODELS_ERRORS as error:
        answer = Answer[Times](refused=f"{type(error).__name__}: {error}")
    options.times.write_text(answer.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
