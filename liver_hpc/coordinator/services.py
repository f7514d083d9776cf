"""The outside world of the coordinator, each part replaceable by its in-memory twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from liver_hpc.clock import Clock
from liver_hpc.cluster.launcher import Launcher
from liver_hpc.cluster.pool import NodePool
from liver_hpc.layout.placement import place
from liver_hpc.recipes.base import Recipe
from liver_hpc.rendezvous.base import Rendezvous
from liver_hpc.run.decide import Place
from liver_hpc.run.events import JournalFailed
from liver_hpc.run.journal import Journal, Written


@dataclass(frozen=True)
class Services:
    """What a coordinator works with. It closes all but clock and recipe at its end.

    open_journal: makes the journal, which is told whom to tell. attributes: facts for the record.
    """

    clock: Clock
    recipe: Recipe
    launcher: Launcher
    rendezvous: Rendezvous
    open_journal: Callable[[Callable[[Written | JournalFailed], None]], Journal]
    attributes: Mapping[str, str] = field(default_factory=dict)
    pool: NodePool = field(default_factory=NodePool)
    place: Place = place
