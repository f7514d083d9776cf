"""The nodes that a run may hold, and what is heard of them as they come and go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node that agents can be launched on.

    allocation: the name of what it came with: a component, or a burst allocation. slots: how many
    workers it takes, None without bound. preemptible: it may be taken away again. automatic: used
    as soon as it is there; otherwise only when somebody asks for so many workers. burst: it was
    asked for while the run goes on, and goes back when it is of no use.
    """

    name: str
    allocation: str
    slots: int | None = None
    preemptible: bool = False
    automatic: bool = True
    burst: bool = False


@dataclass(frozen=True)
class Seat:
    """Where one agent is to run, and the slots of the node that its workers take."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class NodeGranted:
    """A node is held and answers."""

    node: Node


@dataclass(frozen=True)
class NodeWarned:
    """A node is to be left.

    reason: "preempted", "time limit", "drained", "cancelled", "operator" or "node hours".
    at_s: when the warning came. deadline_s: when its processes will be killed; None when nobody
    has set a time. Both in epoch seconds. A second warning of a node beats the first.
    """

    node: str
    reason: str
    at_s: float
    deadline_s: float | None = None


@dataclass(frozen=True)
class NodeGone:
    """A node is held no longer, and whatever ran there has ended."""

    node: str
    reason: str


@dataclass(frozen=True)
class EndNear:
    """The allocation in which the coordinator itself lives ends at `deadline_s`, epoch seconds."""

    reason: str
    at_s: float
    deadline_s: float


@dataclass(frozen=True)
class PoolNote:
    """Something that an operator would want to see: a refused request, a controller away."""

    text: str


PoolEvent = NodeGranted | NodeWarned | NodeGone | EndNear | PoolNote
