"""Dropout that is the same in every layout: its masks follow the sample, not the worker.

At each layer's entry the random streams are seeded by (run seed, first sample of the micro-batch,
global layer number). Who has a share of the sequence, by context or sequence parallelism, draws the
masks of whole samples, and takes its part. Streams inside tensor-parallel regions (attention heads)
depend on the tp rank besides: there the masks of one layout are not those of another. Attention of
Transformer Engine draws in its kernels: with another cp other masks.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch.overrides import TorchFunctionMode

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.recipes.local_attention import positions
from liver_hpc.world import draws, megatron, thread

_SAMPLES, _LAYERS = 1_000_003, 1009
"""Primes that keep the seeds of samples and layers apart."""
_BEFORE = -1
"""In the place of a layer: what a loss draws before its model goes forward."""
_APART = 1_640_531_527
"""Odd, so that different seeds stay so; those of neighbours are far apart, as Megatron adds the
tensor-parallel rank to a seed."""
_DROPPING = frozenset(
    {"dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout"}
    | {"dropout1d", "dropout2d", "dropout3d"}
)
_DRAWING_INSIDE = frozenset(
    {"gumbel_softmax", "rrelu", "fractional_max_pool2d", "fractional_max_pool3d"}
)
"""Functions that draw where no mode sees it."""
_ATTENTION_RATE = 4
"""Its place among the arguments of torch's scaled_dot_product_attention."""
_RATES = ("attention_dropout", "dropout")
"""What modules call theirs, where it is a number, that drop where no mode sees it: attention of
Transformer Engine, attention and recurrent layers of torch."""


class _Dropping(TorchFunctionMode, ABC):
    """On its thread, and on those that compute its gradients, dropout is another function."""

    @abstractmethod
    def drop(self, function: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of `function(states, ...)`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in _DROPPING:
            states, *rest = args or (kwargs.pop("input"),)
            return self.drop(function, states, *rest, **kwargs)
        if function is torch.autograd.backward:
            with self:  # off while torch asks it, but layers may be computed again now
                return _backward(*args, **kwargs)
        return function(*args, **kwargs)


def _backward(outputs: Any, grad_tensors: Any = None, **options: Any) -> None:
    """What torch.autograd.backward does, which would ask the mode once more.

    It comes here from there, so outputs is a tuple. Megatron calls the engine so, too.
    """
    given = grad_tensors if isinstance(grad_tensors, tuple | list) else [grad_tensors]
    gradients = tuple(
        torch.ones_like(output) if gradient is None else gradient
        for output, gradient in zip(outputs, given, strict=True)
    )
    keep_graph = options["retain_graph"] or options["create_graph"]
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        outputs,
        gradients,
        keep_graph,
        options["create_graph"],
        options["inputs"] or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@contextlib.contextmanager
def no_dropout(chunks: Iterable[Any]) -> Iterator[None]:
    """While a world is rehearsed: dropout drops nothing, so that it draws nothing from streams that
    a training thread uses; what is drawn otherwise comes from generators of its own. Fused
    attention would draw in its kernels, from the process's generator: its modules are told to drop
    nothing. Raises PlanError at dropout that is not seeded, as nothing in these chunks tells of it,
    and at other noise that neither comes from a generator nor was seeded by who draws it.

    chunks: of the world. On a GPU one without dropout is left as it is: what torch compiles under
    another mode than that of a step is compiled anew in the first one.
    """
    chunks = [*chunks]
    on_gpu = any(parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
    seeded = any(map(_drops, chunks))
    mode = _Nothing(seeded) if seeded or not on_gpu else contextlib.nullcontext()
    rates = [
        (part, name, rate)
        for chunk in chunks
        for part in chunk.modules()
        for name in _RATES
        if isinstance(rate := getattr(part, name, None), float)
    ]
    for part, name, _ in rates:
        setattr(part, name, 0.0)
    try:
        with mode:
            yield
    finally:
        for part, name, rate in rates:
            setattr(part, name, rate)


class _Nothing(_Dropping):
    """Nothing is dropped, or drawn from the process's generators. seeded: else whoever would drop
    or draw is refused."""

    def __init__(self, seeded: bool) -> None:
        super().__init__()
        self._seeded = seeded
        self._generators = draws.OwnGenerators()

    def drop(self, function: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check(function.__name__, *_rate(function, *args, **kwargs))
        return states

    def _check(self, name: str, rate: float, training: bool = True) -> None:
        if not self._seeded and training and rate > 0:
            raise PlanError(
                f"the model calls {name} with a rate of {rate:g} which no module of it has, so it "
                "would not be seeded, and tensor-parallel ranks would drop different elements "
                "after a handoff; wanted a module such as torch.nn.Dropout, or the rate as a float "
                "in an attribute of the module with 'drop' in its name"
            )

    def _check_noise(self, name: str) -> None:
        if thread.here.reading and (self._seeded or not thread.here.seeded):
            raise PlanError(
                f"the recipe's fetch draws by {name} without a generator, from streams that "
                "training draws from too, so workers would read other samples after a handoff, and "
                "tensor-parallel ranks different ones; wanted a torch.Generator that is seeded by "
                "the samples (a DataLoader takes one too)"
            )
        computes = thread.here.micro_batch is not None
        if computes and not (self._seeded or thread.here.seeded):
            raise PlanError(
                f"the model or its loss draws by {name} without a generator, from streams that are "
                "seeded for a model with dropout alone, so workers would draw other noise after a "
                "handoff; wanted a torch.Generator or a torch.manual_seed by the samples, or, for "
                "streams seeded by sample and layer, a float above 0 in an attribute of the module "
                "with 'drop' in its name"
            )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := getattr(function, "__name__", "")) == "scaled_dot_product_attention":
            given = args[_ATTENTION_RATE : _ATTENTION_RATE + 1]
            self._check(name, *(given or ((kwargs or {}).get("dropout_p", 0.0),)))
            query_to_mask, rest = args[:_ATTENTION_RATE], args[_ATTENTION_RATE + 1 :]
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dropout_p"}
            return function(*query_to_mask, *((0.0, *rest) if rest else ()), **kwargs)
        if name in _DRAWING_INSIDE and (kwargs or {}).get("training", name != "rrelu"):
            self._check_noise(name)
        if name in draws.DRAWING and (kwargs or {}).get("generator") is None:
            self._check_noise(name)
            return self._generators.draw(function, args, dict(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


def _rate(
    function: Any,
    p: float = 0.5,
    training: bool | None = None,
    *_inplace: bool,
    train: bool | None = None,
    **_others: Any,
) -> tuple[float, bool]:
    """What a function of dropout is called with, and whether it drops: some do so unasked."""
    told = train if training is None else training
    return p, function is torch.nn.functional.dropout if told is None else told


class _PartOfMasks(_Dropping):
    """Dropout of a rank's hidden states, [sequence / cp, micro batch, hidden]; with sequence
    parallelism [sequence / cp / tp, ...], where it takes from the stream that all tp ranks share.

    What has other dimensions is left as it is: who drops attention's probabilities knows which of
    them is the sequence.
    """

    def __init__(self, layout: Layout, at: Coordinate) -> None:
        super().__init__()
        self._cp, self._rank = layout.cp, layout.cp_rank(at)
        self._shares, self._share = (layout.tp, at.tp) if layout.sequence_parallel else (1, 0)

    def drop(self, function: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if states.dim() != 3:
            dropped: torch.Tensor = function(states, *args, **kwargs)
            return dropped
        share, *others = states.shape
        whole = states.new_ones((share * self._shares * self._cp, *others))
        with megatron.stream_of_all_ranks() if self._shares > 1 else contextlib.nullcontext():
            kept = function(whole, *args, **kwargs)
        part: torch.Tensor = states * kept.index_select(0, self._rows(share, states.device))
        return part

    def _rows(self, share: int, device: Any) -> torch.Tensor:
        of_rank = share * self._shares
        if of_rank % 2:  # no share of a sequence
            rows = torch.arange(self._rank * of_rank, (self._rank + 1) * of_rank, device=device)
        else:
            rows = positions(of_rank * self._cp, self._cp, self._rank, device)
        return rows[self._share * share : (self._share + 1) * share]


def masks_of_samples(
    layout: Layout, at: Coordinate, chunks: Iterable[Any]
) -> contextlib.AbstractContextManager[Any]:
    """While a coordinate computes: on its thread, the masks of its share of a sample are those that
    the share has in the whole sample."""
    shared = layout.cp > 1 or layout.sequence_parallel
    if not shared or not any(map(_drops, chunks)):
        return contextlib.nullcontext()
    return _PartOfMasks(layout, at)


def seed_at_layers(module: Any, seed: int, tp_rank: int, sequence_parallel: bool) -> None:
    """Makes a chunk seed the random streams as it enters a forward, and each of its layers too,
    where anything in it drops; dropout that torch compiles, which draws other masks, is taken out.

    Layers are the outermost modules with a number of their own, which counts from 1 over the whole
    model; what comes before the first one counts as layer 0.
    """
    if not _drops(module):
        return
    for part in module.modules():
        if getattr(getattr(part, "config", None), "bias_dropout_fusion", False):
            part.config.bias_dropout_fusion = False  # layers read it in each forward
    for layer, entered in [(0, module), *_layers(module)]:
        entered.register_forward_pre_hook(partial(_seed, seed, layer, tp_rank, sequence_parallel))


def _seed(run: int, layer: int, tp_rank: int, shares: bool, module: Any, _inputs: Any) -> None:
    """Seeds by the micro-batch that this thread computes. Raises PlanError in a rehearsal where a
    forward comes here twice, or to two of one number: it would drop the same elements."""
    micro_batch, entered = thread.here.micro_batch, thread.here.entered
    if thread.here.rehearsing and entered is not None and module.training and layer != _BEFORE:
        _refuse_same_masks(layer, module, entered)
        entered[module] = layer
    if module.training and micro_batch is not None:
        seed = run + _SAMPLES * (micro_batch.first_sample + 1)
        number = (seed * _LAYERS + layer) * _APART
        megatron.seed_dropout(number % 2**31, tp_rank, shares)


def _refuse_same_masks(layer: int, module: Any, entered: Mapping[Any, int]) -> None:
    """entered: what has gone forward in the micro-batch, and by which number."""
    if module in entered:
        raise PlanError(
            f"{type(module).__name__} (layer {layer}) goes forward twice in a micro-batch, and "
            "would drop the same elements both times, as masks are seeded by sample and layer: "
            "compute both at once, one behind the other in the batch, or drop nothing"
        )
    for other, number in entered.items():
        if number == layer and any(_dropping(other)) and any(_dropping(module)):
            raise PlanError(
                f"a {type(other).__name__} and a {type(module).__name__} that drop both have "
                f"layer_number {layer}, and would drop the same elements, as masks are seeded by "
                "sample and layer: count layers over the whole model, or drop nothing in one of "
                "both"
            )


def seed_before(chunks: Iterable[Any], seed: int, tp_rank: int) -> Callable[[Any], None] | None:
    """What seeds the random streams for what a loss draws before it calls a chunk, which it is
    given; None where nothing drops."""
    if not any(map(_drops, chunks)):
        return None
    return lambda chunk: _seed(seed, _BEFORE, tp_rank, False, chunk, ())


def refuse_unnumbered(chunk: Any) -> None:
    """Raises PlanError for a chunk other than the model's first that drops, and has no layers that
    are known by their numbers: its masks would be those of the first one."""
    if (name := next(_dropping(chunk), None)) is not None and not any(_layers(chunk)):
        raise PlanError(
            f"{name} drops in a chunk of a pipeline whose layers have no numbers, and its masks "
            "would be those of the first chunk: wanted `layer_number` in each layer, an int that "
            "counts from 1 over the whole model"
        )


def _drops(module: Any) -> bool:
    """Whether its configuration says so, or a module in it has a rate."""
    config = module.config
    rates = [getattr(config, name, 0) for name in ("hidden_dropout", "attention_dropout")]
    return any(rates) or any(_dropping(module))


def _dropping(module: Any) -> Iterator[str]:
    """The modules in it that have a rate of whatever name, such as the `p` of torch's and the
    `dropout` of its attention."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            rate = isinstance(value, float) and value > 0
            if rate and ("drop" in name or (name == "p" and value <= 1)):  # a norm's may be 2
                yield path or type(part).__name__


def _layers(module: Any) -> Iterator[tuple[int, Any]]:
    for part in module.children():
        number = getattr(part, "layer_number", None)
        if isinstance(number, int):
            # Those that predict further tokens are counted on their own.
            behind = part.config.num_layers if isinstance(part, MultiTokenPredictionLayer) else 0
            yield behind + number, part
        else:
            yield from _layers(part)
