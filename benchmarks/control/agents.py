"""Simulated agents in a process of their own: real connections, workers that only answer.

What a worker says and asks of the store is what `liver_hpc/handoff` says on a GPU cluster: of each
group one member sets NCCL's id, which the others get, one group after the other.
"""

from __future__ import annotations

import json
import selectors
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from liver_hpc import __version__
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.channel import ITSELF, Channel, ChannelClosed, Part, connect
from liver_hpc.rendezvous.conversation import Conversation

CONNECT_S = 60.0
DIGEST = f"{0x1234_5678_9ABC_DEF0:016x}"
NCCL_ID = "A" * 172
"""As long as 128 bytes in base64."""


@dataclass(frozen=True)
class Crossing:
    """What crosses in a handoff: to how many peers each worker sends, and which kinds of state."""

    peers: int
    kinds: tuple[str, ...]


@dataclass
class Worker:
    """number: its id. asked: of how many groups it has asked the store."""

    number: int
    conversation: Conversation
    step: int = 0
    generation: int = -1
    source: RankMap | None = None
    target: RankMap | None = None
    groups: Sequence[tuple[str, bool]] = ()
    asked: int = 0


@dataclass
class Agent:
    name: str
    channel: Channel
    own: Conversation = field(default_factory=Conversation)
    workers: dict[int, Worker] = field(default_factory=dict)
    to_send: list[Part] = field(default_factory=list)
    asked: list[tuple[int, m.StoreRequest]] = field(default_factory=list)

    def say(self, worker: Worker, message: m.Message | bytes) -> None:
        data = message if isinstance(message, bytes) else m.encode(message)  # type: ignore[arg-type]
        self.to_send.append(worker.conversation.say(data))


def play(line: Connection, secret: bytes, agents: int, crossing: Crossing) -> None:
    """Until the coordinator has told all agents to exit. line: gives (agent, Answer) for each of
    them."""
    selector = selectors.DefaultSelector()
    for _ in range(agents):
        agent = _started(line.recv(), secret)
        selector.register(agent.channel, selectors.EVENT_READ, agent)
    while agents:
        for key, _ in selector.select():
            agent = key.data
            if not _hear(agent, crossing):
                selector.unregister(agent.channel)
                agent.channel.close()
                agents -= 1


def _started(start: tuple[str, Answer], secret: bytes) -> Agent:
    name, answer = start
    address = (answer.control_host, answer.control_port)
    agent = Agent(name, connect(address, secret, CONNECT_S, "the coordinator"))
    agent.channel.send(m.Calls(agent=name, version=__version__, launches=(name,)))
    agent.channel.receive(CONNECT_S)
    hello = m.AgentHello(agent=name, host=name, pid=1)
    agent.to_send.append(agent.own.say(m.encode(hello)))
    for number in answer.worker_ids:
        worker = agent.workers[number] = Worker(number, Conversation(number))
        agent.say(worker, m.Hello(worker=number, pid=number, host=name, booted_s=0.0))
    _flush(agent)
    return agent


def _flush(agent: Agent) -> None:
    if agent.asked:
        agent.to_send.append(Part(m.encode(m.StoreAsks.of(agent.asked))))
        agent.asked = []
    if agent.to_send:
        agent.channel.post(agent.to_send)
        agent.to_send = []


def _hear(agent: Agent, crossing: Crossing) -> bool:
    """Answers what has come with a frame; false where the agent was told to exit."""
    try:
        frames = agent.channel.receive_ready()  # all: of what is read already no selector tells
    except ChannelClosed:
        return False
    for part in chain.from_iterable(frames):
        if part.who == ITSELF:
            match m.decode(part.data) if part.data else None:
                case m.Exit():
                    return False
                case m.StoreAnswers(answers=answers):
                    for number, _ in (asker for each in answers for asker in each.askers):
                        _answered(agent, agent.workers[number], crossing)
            continue
        worker = agent.workers[part.who]
        if worker.conversation.take(part):
            worker.conversation.is_safe(part.number)
            _answer(agent, worker, _decoded(part.data), crossing)
    _flush(agent)
    return True


@lru_cache(maxsize=64)
def _decoded(data: bytes) -> m.AnyMessage:
    """What is told to all is decoded once here: each worker has a process of its own in truth."""
    return m.decode(data)


_of_generation: dict[int, tuple[RankMap, RankMap]] = {}


def _worlds(message: m.Prepare) -> tuple[RankMap, RankMap]:
    """Source and target, made once for all workers."""
    if message.generation not in _of_generation:
        _of_generation.clear()
        worlds = message.source.rank_map(), message.target.rank_map()
        _of_generation[message.generation] = worlds
    return _of_generation[message.generation]


def _answer(agent: Agent, worker: Worker, message: m.AnyMessage, crossing: Crossing) -> None:
    match message:
        case m.Prepare():
            worker.generation = message.generation
            worker.source, worker.target = _worlds(message)
            worker.groups, worker.asked = [*_groups(worker)], 0
            _ask_store(agent, worker)
        case m.Arm():
            _say_crossed(agent, worker, crossing)
        case m.Verdict():
            _say_stepped(agent, worker)
        case m.Stop():
            agent.say(worker, m.Finished(worker=worker.number, step=worker.step))
        case m.Exit():
            ended = m.WorkerEnded(agent=agent.name, worker=worker.number, how="exit code 0")
            agent.to_send.append(agent.own.say(m.encode(ended)))
        case _:
            pass


def _answered(agent: Agent, worker: Worker, crossing: Crossing) -> None:
    """By the store."""
    _ask_store(agent, worker)
    if worker.asked > len(worker.groups):
        _say_prepared(agent, worker, crossing)


def _ask_store(agent: Agent, worker: Worker) -> None:
    """The next request, if there is one; it goes with those of the others that have heard in the
    same frame."""
    if worker.asked < len(worker.groups):
        key, sets = worker.groups[worker.asked]
        operation, value = ("set", NCCL_ID) if sets else ("get", "")
        request = m.StoreRequest(
            number=worker.asked + 1,
            operation=operation,  # type: ignore[arg-type]
            keys=(key,),
            value=value,
            timeout_s=60.0,
        )
        agent.asked.append((worker.number, request))
    worker.asked += 1


def _groups(worker: Worker) -> Iterator[tuple[str, bool]]:
    """The keys of the groups of a worker's new seat, and whether it is the one who sets it: of all
    tensor-parallel, pipeline, data-parallel, model-parallel and embedding groups, and the transfer
    itself."""
    assert worker.target is not None
    target, layout = worker.target, worker.target.layout
    at = target.coordinate_of(worker.number)
    name = f"g{worker.generation}/0123456789abcdef"
    if at is not None:
        if layout.tp > 1:
            yield f"{name}/tp{at.pp}-{at.replica}", at.tp == 0
        if layout.pp > 1:
            yield f"{name}/pp{at.tp}-{at.replica}", at.pp == 0
            yield f"{name}/mp{at.replica}", at.tp == at.pp == 0
            if at.pp in (0, layout.pp - 1):
                yield f"{name}/embedding{at.tp}-{at.replica}", at.pp == 0
        if layout.replicas > 1:
            yield f"{name}/dp{at.tp}-{at.pp}", at.replica == 0
    yield f"{name}/transfer", worker.number == target.workers[0]


def _peers(worker: Worker, crossing: Crossing, way: int) -> list[int]:
    """To whom a worker sends (way 1), or who sends to it (-1)."""
    assert worker.target is not None
    members, first = len(worker.target.workers), worker.number + way
    return [at % members for at in range(first, first + way * crossing.peers, way)]


def _say_prepared(agent: Agent, worker: Worker, crossing: Crossing) -> None:
    generation, workers = worker.generation, len(worker.target.workers)  # type: ignore[union-attr]
    transports = m.Transports(
        worker=worker.number,
        generation=generation,
        workers=workers,
        host=agent.name,
        kinds=("NET/IB",),
        detail="NET/IB : mlx5_0:1/IB",
    )
    agent.say(worker, transports)
    prepared = m.Prepared(
        worker=worker.number,
        generation=generation,
        timings_s={"build": 0.5, "plan": 0.1, "connect": 0.5, "staging": 0.1, "rehearsal": 0.5},
        bytes_out=10 * crossing.peers,
        bytes_in=10 * crossing.peers,
        bytes_to=dict.fromkeys(_peers(worker, crossing, 1), 10),
    )
    agent.say(worker, prepared)


def _say_crossed(agent: Agent, worker: Worker, crossing: Crossing) -> None:
    scalars = m.ScalarState(
        step=worker.step, consumed_samples=worker.step, optimizer_step=0, loss_scale=1.0, seed=1
    )
    about: dict[str, Any] = {"worker": worker.number, "generation": worker.generation}
    agent.say(worker, m.AtBoundary(**about, scalars=scalars, last_step_ended_s=1.0))
    agent.say(worker, _vote(worker, crossing))


def _vote(worker: Worker, crossing: Crossing) -> bytes:
    """As text: models of thousands of digests would take longer here than at the coordinator."""

    def told(way: int) -> str:
        """Of the parameters, which have peers of their own, and of the optimizer's state."""
        peers = _peers(worker, crossing, way)
        halves = [crossing.kinds[:1], crossing.kinds[1:]]
        return ",".join(
            f'{{"kinds":{json.dumps(kinds)},"peers":{peers},'
            f'"values":"{DIGEST * len(peers) * len(kinds)}"}}'
            for kinds in halves
        )

    return (
        f'{{"type":"vote","worker":{worker.number},"generation":{worker.generation},"ok":true,'
        f'"spec":"{DIGEST}","sent":[{told(1)}],"received":[{told(-1)}],"started_s":1.0,'
        '"timings_s":{"boundary":0.01,"wire":0.1,"digests":0.01,"forward":0.1}}'
    ).encode()


def _say_stepped(agent: Agent, worker: Worker) -> None:
    about: dict[str, Any] = {"worker": worker.number, "generation": worker.generation}
    agent.say(worker, m.FirstStep(**about, started_s=1.0, ended_s=2.0))
    released = m.Released(**about, file_descriptors=99, resident_bytes=10**9, released_s=1.0)
    agent.say(worker, released)
    assert worker.target is not None
    if worker.target.workers[0] == worker.number:
        done = m.StepDone(
            **about,
            step=worker.step,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=0.1,
            tokens=64,
            started_s=1.0,
            ended_s=2.0,
        )
        agent.say(worker, done)
    worker.step += 1
