"""What differs between megatron-core releases, and what megatron keeps in module globals.

It supports 0.16 (the newest for Python 3.11) and 0.19. Groups go in as a `ProcessGroupCollection`,
and what megatron still reads from globals is redirected here and in `parallel_state.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import GlobalMemoryBuffer

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import TensorSpec
from liver_hpc.world import thread
from liver_hpc.world.groups import Group, GroupBook
from liver_hpc.world.module_globals import Instead
from liver_hpc.world.parallel_state import answer_from

_seeding = inspect.signature(megatron_random.model_parallel_cuda_manual_seed).parameters
_SEEDING_RANKS = [name for name in _seeding if name.endswith("_rank")]
"""The ranks that this release's seeding takes; it asks parallel_state for one not given."""


class _ThreadMemoryBuffer(threading.local, GlobalMemoryBuffer):  # type: ignore[misc]
    """megatron's scratch buffers, one set a thread, since a world is rehearsed beside training."""


def sharding_metadata(
    groups: ProcessGroupCollection, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `sharded_state_dict` wants to be told. metadata: of a checkpoint; without one each layer
    is a tensor of its own."""
    names = ("dp_cp_group", "dp_cp_group_gtp_remat")
    told = {"non_homogeneous_layers": True} if metadata is None else metadata
    return {**told, **dict.fromkeys(names, groups.dp_cp)}


@cache
def prepare_process(seed: int) -> None:
    """Redirects megatron's globals; once a process, before the first model. No communication."""
    parallel_state._GLOBAL_MEMORY_BUFFER = _ThreadMemoryBuffer()
    _build_optimizers_alone()
    _order_messages_of_two_stages()
    seed_dropout(seed, tp_rank=0)
    _keep_rehearsals_from_forking()
    _keep_rehearsals_from_setting_streams()
    # The first AdamW of a process imports torch._dynamo, for which nobody is to wait later.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _build_optimizers_alone() -> None:
    """The optimizer's constructor gathers the keys of parameter groups over the default group,
    which does not exist here; all ranks build theirs by the same rules anyway."""

    def gather(out: list[Any], value: Any, *_args: Any) -> None:
        out[0] = value

    alone = Instead(dist, get_world_size=lambda *_args: 1, all_gather_object=gather)
    module: Any = importlib.import_module("megatron.core.optimizer")
    module.torch = Instead(torch, distributed=alone)


def answer_norm_groups(chained: Any, chunks: Iterable[Any]) -> None:
    """From 0.19 on an optimizer asks all ranks once, in its first step, whether there are
    parameters that have a gradient norm of their own, as MTP's do. It asks as often as the rank has
    optimizers, of which a stage without experts has one and others two; and a rehearsal would ask
    stand-ins. So it is answered here: there are none. Raises ConfigError where there are."""
    module: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    names = getattr(module, "SEPARATE_GRAD_NORM_GROUPS", ())
    if not names:
        return
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if (group := getattr(parameter, module.GRAD_NORM_GROUP_ATTR, None)) is not None:
                raise ConfigError(
                    f"parameter {name!r} has a gradient norm of its own, that of the group "
                    f"{group!r}: supported is one norm of all parameters"
                )
    chained._has_grad_norm_group_cache = dict.fromkeys(names, False)


def _order_messages_of_two_stages() -> None:
    """In a pipeline of two stages the one before is the one behind, too: in Megatron's batch of
    messages what goes forward would be taken for what goes back (0.16: silently wrong gradients of
    an interleaved pipeline). Its other way wants the default group, which does not exist here."""
    module: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    plain = module._batched_p2p_ops

    def batched(**given: Any) -> list[Any]:
        if given["prev_pipeline_rank"] != given["next_pipeline_rank"]:
            return list(plain(**given))
        forth = given | {"tensor_send_prev": None, "tensor_recv_next": None}
        back = given | {"tensor_send_next": None, "tensor_recv_prev": None}
        return [*plain(**forth), *plain(**back)]

    module._batched_p2p_ops = batched


def _keep_rehearsals_from_forking() -> None:
    """Two threads inside the RNG tracker's `fork` would swap the device's generator under each
    other's feet: a rehearsing thread leaves it alone. And it always says that it is seeded, as it
    is but while training seeds it anew: layers of Transformer Engine that are built at that moment
    would do without it for good."""
    tracker = megatron_random._CUDA_RNG_STATE_TRACKER

    def fork(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if thread.here.rehearsing else tracker.fork(*args, **kwargs)

    megatron_random._CUDA_RNG_STATE_TRACKER = Instead(
        tracker, fork=fork, is_initialized=lambda: True
    )


def _keep_rehearsals_from_setting_streams() -> None:
    """Recomputation sets the random streams back to where they were in the forward, and then
    forth again: what a training thread draws meanwhile would be lost. So would it where a model or
    a loss seeds the streams, which gets a generator with that seed, as torch gives it the stream's.
    """

    def kept(function: Any, instead: Any = lambda *_args, **_kwargs: None) -> Any:
        @wraps(function)
        def put(*args: Any, **kwargs: Any) -> Any:
            return (instead if thread.here.rehearsing else function)(*args, **kwargs)

        return put

    def seeded(seed: Any) -> torch.Generator:
        thread.here.seeded = True
        return torch.Generator().manual_seed(int(seed))

    modules: Any = (torch, torch.random, torch.cuda, torch.cuda.random)
    for module in modules:
        module.set_rng_state = kept(module.set_rng_state)
    for module in modules[:2]:
        module.manual_seed = kept(module.manual_seed, seeded)
    for module in modules[2:]:
        module.manual_seed = kept(module.manual_seed)
        module.manual_seed_all = kept(module.manual_seed_all)
    megatron_random._set_all_rng_states = kept(megatron_random._set_all_rng_states)


_REPLACED = "liver_hpc.replaced"


def renew_accumulators(chunk: Any) -> int:
    """Gradients of a chunk's parameters are added up on the calling thread's stream from now on.

    torch runs a parameter's AccumulateGrad node on the stream that was current when it came to be,
    and Megatron's DDP keeps each one (`grad_accs`), with the hook that adds to `main_grad` and
    starts reductions. For a world that is built beside training that is PREPARE's stream: whatever
    came there later, training would wait for. Returns of how many it stays, as some graph has
    their nodes, too.
    """
    for node in chunk.grad_accs:
        node.metadata[_REPLACED] = True
    parameters = [node.variable for node in chunk.grad_accs]
    node, chunk.grad_accs, stay = None, [], 0
    for parameter in parameters:
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        if _REPLACED in node.metadata:
            stay += 1
        else:
            node.register_hook(chunk._make_backward_post_hook(parameter))
        chunk.grad_accs.append(node)
    return stay


def computes_by_transformer_engine(chunks: Iterable[torch.nn.Module]) -> bool:
    """Whether a layer is one of Transformer Engine's. All threads of a process share its workspace
    for products, the choice of attention's kernels, and the random stream that those draw from."""
    return any(
        base.__module__.partition(".")[0] == "transformer_engine"
        for chunk in chunks
        for kind in {type(part) for part in chunk.modules()}
        for base in kind.__mro__
    )


def transformer_engine_is_here() -> bool:
    """Whether Megatron has found Transformer Engine."""
    return bool(getattr(megatron_random, "HAVE_TE", False))


def seed_dropout(seed: int, tp_rank: int, sequence_parallel: bool = False) -> None:
    """Seeds the device's generator and megatron's tensor-parallel stream, except in a rehearsal.
    And the host's generator, from which a model may draw where the device is a GPU, too.

    sequence_parallel: megatron is in a `fork` of that stream around all layers, so it stays there.
    """
    if thread.here.rehearsing:
        return
    ranks = dict.fromkeys(_SEEDING_RANKS, 0) | {"tp_rank": tp_rank}
    tracker = _tracker()
    forked = tracker._current_state_name
    torch.default_generator.manual_seed(seed)
    megatron_random.model_parallel_cuda_manual_seed(seed, **ranks)
    if sequence_parallel:
        name = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
        megatron_random._set_cuda_rng_state(tracker.states_[name])
        tracker._current_state_name = forked


def stream_of_all_ranks() -> contextlib.AbstractContextManager[None]:
    """Within it the device's generator is the stream that all tensor-parallel ranks share."""
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    forked: contextlib.AbstractContextManager[None] = tracker.fork(
        megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME
    )
    return forked


def _tracker() -> Any:
    """Megatron's own, of which `_keep_rehearsals_from_forking` has another one answer."""
    tracker = megatron_random.get_cuda_rng_tracker()
    return tracker._plain if isinstance(tracker, Instead) else tracker


@contextlib.contextmanager
def kept_streams() -> Iterator[None]:
    """At its end the random streams of this process are where they were. Not in a rehearsal."""
    states = megatron_random._get_all_rng_states()
    try:
        yield
    finally:
        megatron_random._set_all_rng_states(*states)


def mark_tensor_parallel(parameter: torch.Tensor, tensor: TensorSpec) -> None:
    """Sets the tensor-parallel attributes of a parameter, whatever its layer; else the gradient
    norm is silently wrong.

    Of one that is split 0.16 leaves them unset with `perform_initialization=False`: shards count as
    replicas. Of one that is not, Transformer Engine sets them all the same where each tp rank
    computes all of a product, as in multi-latent attention: replicas count as shards.
    """
    marked: Any = parameter
    is_marked = getattr(parameter, "tensor_model_parallel", False)
    if tensor.tp_dim is not None and not is_marked:
        marked.tensor_model_parallel = True
        marked.partition_dim, marked.partition_stride = tensor.tp_dim, 1
    elif tensor.tp_dim is None and is_marked:
        marked.tensor_model_parallel = False


def is_decoupled(parameter: torch.Tensor) -> bool:
    """Whether a parameter has the decoupled learning rate where there is one."""
    return bool(getattr(parameter, "is_embedding_or_output_parameter", False))


def summed_over_stages(module: Any) -> torch.Tensor | None:
    """The parameter of a chunk at either end of a pipeline whose gradients are summed over both
    (megatron.core.distributed.finalize_model_grads); None where there is none."""
    predicts = getattr(module.config, "mtp_num_layers", None)
    if predicts or getattr(module, "share_embeddings_and_output_weights", False):
        found: torch.Tensor | None = module.shared_embedding_or_output_weight()
        return found
    return None


def weighs_auxiliary_losses_by_sequences() -> bool:
    """Whether the router takes `calculate_per_token_loss` to be of whole sequences: before 0.19 it
    counts the tokens of its rank's share of them alone."""
    return (package_info.MAJOR, package_info.MINOR) >= (0, 19)


def tell_auxiliary_losses(
    tell: Callable[[str, torch.Tensor, dist.ProcessGroup | None], None],
) -> None:
    """Has auxiliary losses told by name as they are computed, in the place of a record that is one
    for the process: of a layer and micro-batch, to be summed over a group where one is told."""

    def of_experts(
        name: str,
        loss: torch.Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> None:
        tell(name, loss, reduce_group)

    def of_prediction(loss: torch.Tensor, number: int, *_: Any, **_more: Any) -> None:
        tell(f"mtp_{number + 1}_loss", loss, None)

    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    if hasattr(router, "save_to_aux_losses_tracker"):
        router.save_to_aux_losses_tracker = of_experts
    else:  # from 0.18 on
        logging: Any = importlib.import_module("megatron.core.transformer.moe.moe_logging")
        logging.MoEMetricsTracker.record = lambda _tracker, *told, **more: of_experts(*told, **more)
    if hasattr(MTPLossLoggingHelper, "save_loss_to_tracker"):
        MTPLossLoggingHelper.save_loss_to_tracker = staticmethod(of_prediction)
    else:  # from 0.19 on, where it tells how many of the predictions were right, too
        MTPLossLoggingHelper.save_metrics_to_tracker = staticmethod(
            lambda loss, _correct, _total, number, *_, **_more: of_prediction(loss, number)
        )


def in_low_precision(module: Any) -> Any:
    """The module as it is trained: wrapped for bf16 where its configuration says so.

    The wrapper casts all floating-point tensors. A router's counts and bias stay fp32, as Megatron
    would make the bias again in the first forward, in other memory, and counts in bf16 end at 256.
    """
    if not module.config.bf16:
        return module
    kept = [
        (part, name, getattr(part, name))
        for part in module.modules()
        for name in ("expert_bias", "local_tokens_per_expert")
        if isinstance(getattr(part, name, None), torch.Tensor)
    ]
    wrapped = Float16Module(module.config, module)
    for part, name, buffer in kept:
        setattr(part, name, buffer)
    return wrapped


def as_built(chunk: Any) -> Any:
    """The module that the recipe has built, in a chunk's wrappers."""
    module = chunk.module
    return module.module if isinstance(module, Float16Module) else module


def configure_for_schedules(config: Any, chunks: list[Any], layout: Layout) -> None:
    """Tells a chunk's configuration what Megatron's schedules call at the end of a batch."""
    config.finalize_model_grads_func = finalize_model_grads
    options = chunks[0].ddp_config
    alone = len(chunks) == 1

    def each(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions[0] if alone else functions

    if options.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        config.grad_sync_func = each("start_grad_sync")
    if options.overlap_param_gather:
        config.param_sync_func = each("start_param_sync")
    if layout.vpp > 1:  # which a recipe of one's own need not have told Megatron
        config.virtual_pipeline_model_parallel_size = layout.vpp
        config.microbatch_group_size_per_vp_stage = layout.pp
    config.batch_p2p_comm = True  # the other way goes over the default group
    # Else each message waits for all of the device, optimizer state that arrives meanwhile, too.
    config.batch_p2p_sync = False


def complete_for_schedules(module: Any) -> None:
    """Gives a plain module what Megatron's schedules look for, and use with pipelines only."""
    if not hasattr(module, "set_input_tensor"):
        module.set_input_tensor = lambda _tensor: None
    if not hasattr(module, "model_type"):
        module.model_type = ModelType.encoder_or_decoder


def begin_gradients_at_layers(module: Any) -> None:
    """Lets gradients reach layers that are computed again where nothing before them is trained.

    What is checkpointed passes gradients on only where its input wants some: behind a frozen
    embedding the first adapters would silently get none.
    """

    def begin(_part: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        states = args[0] if args else options.get("hidden_states")
        if isinstance(states, torch.Tensor) and states.is_leaf and torch.is_grad_enabled():
            states.requires_grad_()

    if all(parameter.requires_grad for parameter in module.parameters()):
        return
    for block in blocks_of_layers(module):
        block.register_forward_pre_hook(begin, with_kwargs=True)


def blocks_of_layers(module: Any) -> list[Any]:
    """Megatron's parts that may compute their layers again: of all releases, such that count so
    how many they have."""
    return [part for part in module.modules() if hasattr(part, "num_layers_per_pipeline_rank")]


@contextlib.contextmanager
def without_gathers(chunks: Sequence[Any]) -> Iterator[None]:
    """While it lasts, a forward takes the parameters for gathered: those of all replicas are the
    same."""
    gathers = [(chunk.config, chunk.config.param_sync_func) for chunk in chunks]
    for chunk in chunks:
        chunk.config.param_sync_func = None
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.param_gather_dispatched = True
    try:
        yield
    finally:
        for config, gather in gathers:
            config.param_sync_func = gather


def begin_again(chunks: list[Any]) -> None:
    """Forgets, after a rehearsal, which gradients a micro-batch gives: the next step counts as the
    first one, whose reductions Megatron launches in the order of buckets.

    A rank that knows launches each reduction as soon as its gradients are there, in another order
    than one that has not rehearsed.
    """
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}
            group.per_param_grad_ready_counts = {}


def group_collection(rank_map: RankMap, at: Coordinate, book: GroupBook) -> ProcessGroupCollection:
    """Megatron's groups at one coordinate of a rank map, taken from `book`. No communication."""
    layout = rank_map.layout
    tps, pps, replicas = range(layout.tp), range(layout.pp), range(layout.replicas)
    cp_rank, first_cp = layout.cp_rank(at), layout.dp_rank(at) * layout.cp
    ep_rank = layout.ep_rank(at)
    cps = range(first_cp, first_cp + layout.cp)
    eps = range(at.replica - ep_rank, at.replica - ep_rank + layout.ep)
    ends = sorted({0, layout.pp - 1})

    def made(tps: Sequence[int], pps: Sequence[int], replicas: Sequence[int]) -> Group:
        members = [Coordinate(t, p, r) for p in pps for r in replicas for t in tps]
        return book.group(map(rank_map.worker_at, members))

    def group(tps: Sequence[int], pps: Sequence[int], replicas: Sequence[int]) -> Any:
        return made(tps, pps, replicas).process_group

    tp, pp, me = (at.tp,), (at.pp,), (at.replica,)
    here = group(tp, pp, me)
    made(tp, pps, me).pair_with_neighbours()
    made(tp, pp, cps).pair_with_neighbours()  # as attention goes round; else it reduces
    made(tp, pp, eps).pair_with_all()
    groups = {
        "pp": group(tp, pps, me),
        "embd": group(tp, ends, me) if at.pp in ends else None,
        "pos_embd": here if at.pp == 0 else None,
        "cp": group(tp, pp, cps),
        "dp": group(tp, pp, range(cp_rank, layout.replicas, layout.cp)),
        "ep": group(tp, pp, eps),
        "tp_cp": group(tps, pp, cps),
        "tp_ep": group(tps, pp, eps),
        "tp_dp_cp": group(tps, pp, replicas),
        "intra_dist_opt": group(tps, pps, replicas),
        **dict.fromkeys(("hcp", "inter_dist_opt")),
        **dict.fromkeys(("gtp_remat", "expt_gtp_remat"), here),
        **dict.fromkeys(("tp", "expt_tp"), group(tps, pp, me)),
        **dict.fromkeys(("dp_cp", "intra_dp_cp", "dp_cp_gtp_remat"), group(tp, pp, replicas)),
        **dict.fromkeys(
            ("expt_dp", "intra_expt_dp", "expt_dp_gtp_remat"),
            group(tp, pp, range(ep_rank, layout.replicas, layout.ep)),
        ),
        "mp": group(tps, pps, me),
        **dict.fromkeys(("tp_ep_pp", "tp_ep_pp_with_egtp_remat"), group(tps, pps, eps)),
    }
    known = {field.name for field in dataclasses.fields(ProcessGroupCollection)}
    found = ProcessGroupCollection(**{name: groups[name] for name in known & groups.keys()})
    answer_from(found, layout)
    return found
