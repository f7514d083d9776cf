"""Every message on the control channel: frozen pydantic models, JSON on the wire, never pickle.

Times are seconds since the epoch (`Clock.now_s`). `generation` numbers the target world of a
handoff attempt; an aborted attempt burns its number. A number that decides something is finite: a
message whose time, window or timing is NaN or infinite is refused. A `Measured` one is carried as
it is, as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from liver_hpc.layout.coordinates import Layout, RankMap

Measured = Annotated[float, Field(allow_inf_nan=True)]
"""What training came to; only training decides what it means when it is not finite."""


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings"
    )


class WireRankMap(_Frozen):
    """A `RankMap` on the wire."""

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    workers: tuple[int, ...]
    nodes: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank_map: RankMap) -> WireRankMap:
        return cls(**asdict(rank_map.layout), workers=rank_map.workers, nodes=rank_map.nodes)

    def rank_map(self) -> RankMap:
        layout = Layout(**self.model_dump(exclude={"workers", "nodes"}))
        return RankMap(layout, self.workers, self.nodes)


class ScalarState(_Frozen):
    """Everything of the logical state that is not a tensor; equal on all workers at a boundary.

    unscheduled_samples: those consumed that the schedule has not counted, of updates that the job
    which the run goes on with had skipped.
    """

    step: int
    consumed_samples: int
    unscheduled_samples: int = 0
    optimizer_step: int
    loss_scale: float
    seed: int


class ClassDigest(_Frozen):
    """Sum over a worker's boxes of one kind of state and one replication class, modulo 2**64.

    `kind` is "parameter", "main", "exp_avg" or "exp_avg_sq"; `value` is 16 hex digits.
    """

    kind: str
    tp_replicated: bool
    multi_stage: bool
    expert: bool = False
    value: str


class PairDigests(_Frozen):
    """Sums over the boxes of each of `kinds` of state that crossed between the teller and each of
    `peers`, modulo 2**64.

    A peer is the worker at the other end, or the teller itself for what it copied within its own
    memory; `values` has 16 hex digits for each, kind by kind.
    """

    kinds: tuple[str, ...]
    peers: tuple[int, ...]
    values: str

    @model_validator(mode="after")
    def _has_as_many(self) -> PairDigests:
        if len(self.values) != 16 * len(self.kinds) * len(self.peers):
            each = f"each of {len(self.peers)} peers and {len(self.kinds)} kinds"
            raise ValueError(f"wanted 16 digits for {each}")
        return self

    def items(self) -> Iterator[tuple[str, int, str]]:
        for number, (kind, peer) in enumerate(product(self.kinds, self.peers)):
            yield kind, peer, self.values[16 * number : 16 * (number + 1)]


class HeldSnapshot(_Frozen):
    """A share of the state that a worker holds in host memory: that of rank `rank` of a world, at
    the boundary `scalars`. digests: by kind, 16 hex digits, as it was when it was taken."""

    generation: int
    layout: str
    rank: int
    scalars: ScalarState
    digests: dict[str, str]


class ForwardTimes(_Frozen):
    """How long a worker has computed its own forward passes in the world `generation`: `passes` of
    them, which count, in `seconds` together, since that world began to train. A pass is that of one
    micro-batch through one chunk of the model."""

    generation: int
    passes: int
    seconds: float


class Message(_Frozen):
    """`class Hello(Message, type="hello")` is known by its `type` on the wire."""

    type: str = ""

    def __init_subclass__(cls, *, type: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if type:  # before pydantic reads the class's fields
            cls.__annotations__ = {"type": Literal[type], **inspect.get_annotations(cls)}
            cls.type = type


class _OfWorker(Message):
    """What one worker says."""

    worker: int


class _OfWorld(Message):
    """What is about one world, be it only attempted."""

    generation: int


class _InWorld(_OfWorker, _OfWorld):
    """What one worker says about one world."""


# ---- agent -> coordinator, and its answer


class Calls(Message, type="calls"):
    """What each connection of an agent to a coordinator begins with; answered with Hears, or with
    Exit where the agent is of no use (any more).

    heard: the number of the last message that the agent has taken for itself; workers: those that
    it has taken for its workers, by worker. epoch: the newest coordinator that it has heard of.
    launches: those that run under it. version: of its liver_hpc.
    """

    agent: str
    version: str = ""
    heard: int = 0
    workers: dict[int, int] = {}
    epoch: int = 0
    launches: tuple[str, ...] = ()


class Hears(Message, type="hears"):
    """From coordinator `epoch`, which has taken the agent's messages up to `heard`, and those of
    workers that it knows up to `workers`."""

    heard: int
    epoch: int
    workers: dict[int, int] = {}


# ---- worker -> coordinator


class Hello(_OfWorker, type="hello"):
    """First message of a worker: it has booted and is ready to PREPARE.

    boot_timings_s: the time from the start of its process to `booted_s`, by what took it. code:
    versions and digests of what it computes with and on, by name, which all workers must have
    alike.
    """

    pid: int
    host: str
    booted_s: float
    boot_timings_s: dict[str, float] = {}
    code: dict[str, str] = {}


class StepDone(_InWorld, type="step_done"):
    """From rank 0 of the world that trains, after every step. metrics: what the recipe told beside
    the loss. snapshot: the newest boundary of which all workers of this world hold what they
    should."""

    step: int
    loss: Measured
    grad_norm: Measured
    learning_rate: Measured
    tokens: int
    started_s: float
    ended_s: float
    metrics: dict[str, Measured] = {}
    snapshot: int | None = None


class Evaluated(_InWorld, type="evaluated"):
    """From rank 0 of the world that trains, after an evaluation. step: how many steps were done.
    loss: the mean over `batches` global batches of the validation set."""

    step: int
    loss: Measured
    batches: int
    started_s: float
    ended_s: float


class Verified(_InWorld, type="verified"):
    """Digests of what a worker of the world that trains held after `step` steps."""

    step: int
    digests: tuple[ClassDigest, ...]


class Prepared(_InWorld, type="prepared"):
    """The target world stands here: groups connected, buffers touched, plan made, warmed up.

    bytes_to: what this worker is about to send, by receiver; `bytes_out` is its sum.
    """

    timings_s: dict[str, float] = {}
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_local: int = 0
    bytes_to: dict[int, int] = {}
    kept_groups: int = 0


class AtBoundary(_InWorld, type="at_boundary"):
    """A source worker has stopped at the agreed step boundary; its state is frozen."""

    scalars: ScalarState
    last_step_ended_s: float


class Progress(_InWorld, type="progress"):
    bytes_done: int


class Vote(_InWorld, type="vote"):
    """A worker's word before the target's first update: whether all state arrived, and the first
    gradients are computed.

    spec: the digest of the model's spec by which it planned and moved. sent, received: what
    crossed. source, target: with `handoff.digests: whole`, all that it held and holds. buffers:
    without that, the persistent buffers that it held.
    started_s: when its first forward began, or, on a leaver, when its parameters were gone.
    timings_s: where the time of crossing went, by what took it.
    """

    ok: bool
    reason: str = ""
    spec: str = ""
    sent: tuple[PairDigests, ...] = ()
    received: tuple[PairDigests, ...] = ()
    source: tuple[ClassDigest, ...] = ()
    target: tuple[ClassDigest, ...] = ()
    buffers: tuple[ClassDigest, ...] = ()
    started_s: float | None = None
    timings_s: dict[str, float] = {}


class FirstStep(_InWorld, type="first_step"):
    """A target worker has finished its first step in the new world. timings_s: what its vote could
    not tell yet: "verdict", from the vote to the verdict, and "update"."""

    started_s: float
    ended_s: float
    timings_s: dict[str, float] = {}


class Released(_InWorld, type="released"):
    """The source world is gone from this worker: groups, buffers, sockets."""

    file_descriptors: int
    resident_bytes: int
    released_s: float


class Aborted(_InWorld, type="aborted"):
    """This worker has let the target world go; a source worker is ready to resume, a joiner for
    another attempt. rebuild: it stood at the boundary, and has let go the source's groups too, as
    the target shared some."""

    rebuild: bool = False


class Failed(_InWorld, type="failed"):
    """Something went wrong in the handoff of this generation; the source world is intact here.
    no_room: a device had none for both worlds, and bounded memory would do."""

    reason: str
    no_room: bool = False


class Heartbeat(_OfWorker, type="heartbeat"):
    """A sign of life, whatever the thread that trains does. stands: where that is, its innermost
    functions first. waits: whether it waits for other workers there. forward: what its forward
    passes took; none where no world trains here."""

    step: int
    stands: str = ""
    waits: bool = False
    forward: ForwardTimes | None = None


class Finished(_OfWorker, type="finished"):
    """The worker has done its last step, or reached the boundary at which it was told to stop."""

    step: int


class Saved(_InWorld, type="saved"):
    """This worker's part of the checkpoint of step `scalars.step` is on disk, flushed.

    digests: of all it holds. num_bytes, checksum: of its file (`checkpoint/index.py`). took_s: from
    the boundary until it was there, beside training or not. error: why it could not be written,
    else empty; the worker trains on.
    """

    scalars: ScalarState
    num_bytes: int = 0
    checksum: str = ""
    took_s: float = 0.0
    digests: tuple[ClassDigest, ...] = ()
    error: str = ""


class Restored(_InWorld, type="restored"):
    """The first world stands, filled from a checkpoint. Digests of all it holds now."""

    scalars: ScalarState
    digests: tuple[ClassDigest, ...]


class NotRestored(_InWorld, type="not_restored"):
    """The checkpoint that the first world is to be filled from cannot be read here."""

    reason: str


class Broken(_InWorld, type="broken"):
    """A step of this world has failed here, as when a peer is gone: this worker waits for Halt."""

    reason: str


class Halted(_InWorld, type="halted"):
    """This worker has let the world go. held: the snapshots that are complete, as far as it knows,
    on all workers of their worlds."""

    held: tuple[HeldSnapshot, ...]


class Refilled(_InWorld, type="refilled"):
    """The world stands here, filled from snapshots; nothing is told by a worker without a seat.

    digests: of all it holds now. shares: by kind, of its own share, as a snapshot would have it.
    """

    scalars: ScalarState
    digests: tuple[ClassDigest, ...] = ()
    shares: dict[str, str] = {}


class Unprotected(_InWorld, type="unprotected"):
    """The snapshot of the boundary after `step` steps has failed; training goes on, and another
    exchange of snapshots is opened at a later one."""

    step: int
    reason: str


class Transports(_InWorld, type="transports"):
    """The groups of a world are connected here. kinds: the transports that they use, such as
    "gloo tcp" or "NET/IB"; none in a world of one. workers: how many that world has."""

    workers: int
    host: str
    kinds: tuple[str, ...]
    detail: str


# ---- coordinator -> worker


class Begin(_OfWorld, type="begin"):
    """Build the first world and start to train: from the seed, or from `checkpoint`, a directory.

    A worker that has read a checkpoint answers Restored and waits for Proceed. weights: it is to
    take the weights alone. evaluate: the evaluation that is due at that checkpoint's step was not
    done.
    """

    rank_map: WireRankMap
    checkpoint: str | None = None
    weights: bool = False
    evaluate: bool = False


class Proceed(_OfWorld, type="proceed"):
    """What all workers have restored, or filled from snapshots, equals what was saved: train; or,
    without a seat, stay for the snapshots that there are."""


class Halt(_OfWorld, type="halt"):
    """Let the world that trains go, and whatever handoff; keep snapshots. Answered with Halted."""

    reason: str


class Refill(_OfWorld, type="refill"):
    """Build a world in place of one that has lost a worker, and fill it from the snapshots of the
    world `saved_generation`: to all that have a seat in it, or give a snapshot.

    holders: by rank of that world, who gives its snapshot. known: how many steps are known to be
    done; the first holder tells again of those before the boundary that are not. evaluate, save:
    the evaluation, or the checkpoint, that is due at that boundary was not done. Answered with
    Refilled by all of them, who then wait for Proceed.
    """

    rank_map: WireRankMap
    saved_generation: int
    saved: str
    holders: tuple[int, ...]
    scalars: ScalarState
    known: int
    evaluate: bool = False
    save: bool = False


class Prepare(_OfWorld, type="prepare"):
    """Build the target world beside what runs; answer with Prepared or Failed.

    bounded: the source's memory makes room for the target's, kind of state by kind of state.
    steps_s: what the steps may take that waits lie beside.
    """

    source: WireRankMap
    source_generation: int
    target: WireRankMap
    bounded: bool = False
    steps_s: float = 0.0


class Rehearse(Message, type="rehearse"):
    """To a spare: rehearse what the first, a middle and the last stage of a layout compute."""

    layout: str


class Arm(_OfWorld, type="arm"):
    """All are prepared: raise the ready flag; joiners wait for the transfer.

    shared_groups: the target took groups of the source over, on some worker. After the boundary
    these may hold half a collective, so an attempt that is called off there lets them go.
    """

    shared_groups: bool = False


class Boundary(_OfWorld, type="boundary"):
    """Where all source workers stand, and which step is computed first.

    To joiners. In bounded memory to all, once a checkpoint of that boundary stands: from then on
    the source's memory is given back.
    """

    scalars: ScalarState


class Verdict(_OfWorld, type="verdict"):
    """All voted yes and the digests agree: the target world is the world."""

    scalars: ScalarState


class Abort(_OfWorld, type="abort"):
    """Drop the target world."""

    reason: str


class Resume(_OfWorld, type="resume"):
    """All source workers have aborted: train on from the boundary. With `rebuild_generation`,
    build the source layout anew, under that number, from the state that is still held."""

    rebuild_generation: int | None = None


class Exit(Message, type="exit"):
    """End this process: a leaver's after COMMIT, that of a joiner who may be at fault after ABORT,
    everybody's at the end; an agent's, once it has ended its workers."""

    reason: str


class Stop(Message, type="stop"):
    """Agree to stop at the next common step boundary, then answer Finished.

    With `checkpoint`, a directory, the state at that boundary is written there first, and Saved
    comes before Finished.
    """

    checkpoint: str | None = None


# ---- coordinator -> joiner


class YourTurn(Message, type="your_turn"):
    """To a joiner that queues: meet the rendezvous over MPI, at this port. mpi: of which release
    the library is there."""

    port_name: str
    mpi: str


# ---- coordinator -> agent that stays (and Exit, to any)


class StartWorkers(Message, type="start_workers"):
    """Start the workers of a further launch in these slots of the node; they rehearse `layout`."""

    launch: str
    slots: tuple[int, ...]
    layout: str


class EndWorkers(Message, type="end_workers"):
    """End the workers of one launch, at once or within `exit_s`; answered with LaunchEnded."""

    launch: str
    reason: str
    at_once: bool = False


class EndWorker(Message, type="end_worker"):
    """Kill a worker that was struck off, if it lives: it may stand still, and hear nothing."""

    worker: int
    reason: str


# ---- agent -> coordinator


class AgentHello(Message, type="agent_hello"):
    """First message of an agent, after the rendezvous."""

    agent: str
    host: str
    pid: int


class Warned(Message, type="warned"):
    """A signal that announces the end of this agent's node came at `at_s`."""

    agent: str
    signal: str
    at_s: float


class WorkerEnded(Message, type="worker_ended"):
    """A worker of this agent has ended. how: its error, where it has told one, "signal 9" or "exit
    code 1", and its log."""

    agent: str
    worker: int
    how: str


class LaunchEnded(Message, type="launch_ended"):
    """Nothing of a launch of this agent, which stays, runs any more. exit_code: as that of an agent
    without other launches. error: why its workers never got to work."""

    agent: str
    launch: str
    exit_code: int
    error: str = ""


class KeeperHello(Message, type="keeper_hello"):
    """First message of the process that keeps a burst allocation for as long as the run lives."""

    job: str


# ---- operator -> coordinator (answered with Reply)


class StatusRequest(Message, type="status"):
    """Where the run stands: a `StatusSnapshot` in the reply's `data`."""


class ResizeRequest(Message, type="resize"):
    """A new layout, or a worker count whose preferred layout is taken."""

    layout: str | None = None
    workers: int | None = None


class ReplaceRequest(Message, type="replace"):
    """Same layout; a fresh worker takes this one's place."""

    replace: int


class DrainRequest(Message, type="drain"):
    """Leave a node live, within `within_s` seconds where that is given; or `undo` that."""

    node: str
    within_s: float | None = None
    undo: bool = False


class StopRequest(Message, type="stop_run"):
    """Stop at the next step boundary; with `checkpoint`, write the state to disk there."""

    checkpoint: bool = False


class Reply(Message, type="reply"):
    """`ok` false means refused, and `text` says why. data: a snapshot, where that was asked for;
    `stops_within_s` of a run that is to stop."""

    ok: bool
    text: str
    data: dict[str, Any] = {}


# ---- store: the key-value store from which process groups are built


VALUES_APART = ","


class StoreRequest(Message, type="store"):
    """From a worker to its agent: one operation of torch's Store interface; `value` is base64.

    number: which of the worker's requests it is; a connection that breaks loses them.
    """

    operation: Literal["set", "get", "add", "wait", "check", "delete"]
    keys: tuple[str, ...]
    value: str = ""
    amount: int = 0
    timeout_s: float = 0.0
    number: int = 0


NO_STORE = "there is no coordinator just now, whose it is"
"""The error of a request of the store's that nobody is there to hear."""


class StoreReply(Message, type="store_reply"):
    """From an agent to a worker: to request `number`.

    What was asked for is in `value`, of several keys with VALUES_APART between, or in `count`.
    `error` is empty on success; a timed-out wait lists the keys that never came.
    """

    value: str = ""
    count: int = 0
    error: str = ""
    number: int = 0


class StoreAsk(StoreRequest):
    """A request of several workers. askers: each by its id, with its request's number."""

    askers: tuple[tuple[int, int], ...]


class StoreAnswer(StoreReply):
    """To those who asked for the same."""

    askers: tuple[tuple[int, int], ...]


class StoreAsks(Message, type="store_asks"):
    """From an agent to the store: what its workers ask for at the same time, in order."""

    asks: tuple[StoreAsk, ...]

    @classmethod
    def of(cls, requests: Iterable[tuple[int, StoreRequest]]) -> StoreAsks:
        """Of requests by workers. What several want to see is asked for once."""
        asks: dict[Any, tuple[StoreRequest, list[tuple[int, int]]]] = {}
        for worker, request in requests:
            looks = request.operation in ("get", "wait", "check")
            same = (request.operation, request.keys, request.timeout_s) if looks else len(asks)
            asks.setdefault(same, (request, []))[1].append((worker, request.number))
        return cls(
            asks=tuple(
                StoreAsk(**request.model_dump(exclude={"number"}), askers=tuple(askers))
                for request, askers in asks.values()
            )
        )


class StoreAnswers(Message, type="store_answers"):
    """From the store to an agent, for its workers."""

    answers: tuple[StoreAnswer, ...]

    def replies(self) -> Iterator[tuple[int, StoreReply]]:
        """To whom, and what."""
        for answer in self.answers:
            for worker, number in answer.askers:
                result = answer.model_dump(exclude={"askers", "number"})
                yield worker, StoreReply(**result, number=number)


OfAttempt = Prepared | AtBoundary | Vote | FirstStep | Released | Aborted | Failed
"""What workers say in the handoff attempt of their generation."""
OfManyAtOnce = OfAttempt | Transports | Halted | Refilled
"""What all workers say in a handoff or a recovery, at nearly the same time."""
OfRecovery = Broken | Halted | Refilled
"""What workers say of a world that has lost one."""
WorkerEvent = (
    Hello | StepDone | Evaluated | Verified | OfAttempt | Finished | Saved | Restored | NotRestored
    | Transports | OfRecovery | Unprotected
)  # fmt: skip
"""What workers say that is an event of the run's core, and in its journal."""
FromWorker = WorkerEvent | Progress | Heartbeat
ToWorker = (
    Begin | Proceed | Halt | Refill | Prepare | Rehearse | Arm | Boundary | Verdict | Abort | Resume
    | Exit | Stop
)  # fmt: skip
ToAgent = StartWorkers | EndWorkers | EndWorker | Exit
FromAgent = AgentHello | Warned | WorkerEnded | LaunchEnded | KeeperHello
OperatorEvent = ResizeRequest | ReplaceRequest | DrainRequest | StopRequest
FromOperator = StatusRequest | OperatorEvent
AnyMessage = (
    Calls | Hears | FromWorker | ToWorker | ToAgent | FromAgent | FromOperator | Reply | YourTurn
    | StoreRequest | StoreReply | StoreAsks | StoreAnswers
)  # fmt: skip

_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(Annotated[AnyMessage, Field(discriminator="type")])


def encode(message: AnyMessage) -> bytes:
    """The message as UTF-8 JSON."""
    return message.model_dump_json().encode()


def decode(data: bytes) -> AnyMessage:
    """The message in `data`; raises pydantic.ValidationError for anything that is not one."""
    return _ADAPTER.validate_json(data)
