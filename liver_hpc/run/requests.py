"""Reconfiguration requests: checked, queued, merged, and granted one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.config.schema import NoticeSection, RunConfig
from liver_hpc.errors import ConfigError, RequestRefused
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ramp import steps_between
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest

OPERATOR = "operator"
STRAGGLING = "straggling"
DRAINS = (OPERATOR, STRAGGLING)
"""Why a node is left that nobody takes away; it is used again once that is undone."""
GROWTH = "nodes granted"
IN_PLACE = "in place of what was lost"


@dataclass(frozen=True)
class ReconfigurationRequest:
    """Another layout, or the same one without worker `replace`.

    origin: OPERATOR, "step N" for a scripted notice, GROWTH, IN_PLACE, or "leaving NODES: REASON".
    made_s: when it was made. without: workers that must not be in the target. deadline_s: when they
    are killed; None when nobody says.
    """

    origin: str
    made_s: float
    layout: Layout | None = None
    replace: int | None = None
    without: tuple[int, ...] = ()
    deadline_s: float | None = None

    def __str__(self) -> str:
        what = f"resize to {self.layout}" if self.layout else f"replace worker {self.replace}"
        return f"{what} ({self.origin})"

    def joiners(self, rank_map: RankMap) -> int:
        """How many workers have to be launched for it."""
        if self.layout is None:
            return 1
        return max(0, self.layout.workers - len(self.kept(rank_map)))

    def kept(self, rank_map: RankMap) -> tuple[int, ...]:
        """The workers of a world that may stay."""
        gone = {*self.without, self.replace}
        return tuple(worker for worker in rank_map.workers if worker not in gone)

    @property
    def asked_for(self) -> bool:
        """The run file or an operator wants it; else the nodes at hand called for it."""
        return self.origin == OPERATOR or self.origin.startswith("step ")

    def pointless(self, rank_map: RankMap) -> str:
        """Why there is nothing to do for it; empty when there is."""
        if self.layout == rank_map.layout and not {*self.without} & {*rank_map.workers}:
            return f"the run already has layout {rank_map.layout}"
        if self.replace is not None and self.replace not in rank_map.workers:
            return f"worker {self.replace} does not train; workers are {list(rank_map.workers)}"
        return ""

    def overtakes(self, earlier: ReconfigurationRequest) -> bool:
        """Whether an earlier request in the queue need not be granted any more.

        A later layout overtakes an earlier one, the same worker is replaced once. What the run
        file has written down is always granted in full.
        """
        if not self.origin == earlier.origin == OPERATOR:
            return False
        return (earlier.layout is None) == (self.layout is None) and earlier.replace == self.replace


class RequestQueue:
    """The requests that wait for their turn, in order, and the run file's that are yet to come.

    waiting: whose turn it is first. awaits: a layout that somebody asked for and whose burst nodes
    are to come; the next one that is asked for takes its place. asked: the workers of the layout
    that somebody asked for last; None before. missing: the layout that was there before workers
    were lost, until it, or what somebody asks for, is there again; None where nodes, and not this,
    say what room there is.
    """

    def __init__(self, config: RunConfig, check_layout: Callable[[Layout], None]) -> None:
        self.asked: int | None = None
        self.missing: Layout | None = None
        self._config = config
        self._check_layout = check_layout
        self.waiting: list[ReconfigurationRequest] = []
        self.awaits: ReconfigurationRequest | None = None
        self._is_over = False
        self._notices = sorted(config.notices, key=lambda notice: notice.at_step)

    @property
    def ceiling(self) -> int:
        """The most workers that the run grows to by itself, or would if it did not observe."""
        return self._config.workers.max if self.asked is None else self.asked

    @property
    def bound(self) -> int:
        """The most workers that it has unless somebody asks for more."""
        observes = self._config.policy.observe and self.asked is None
        return self._config.workers.initial if observes else self.ceiling

    @property
    def first(self) -> ReconfigurationRequest | None:
        """The request whose turn it is."""
        return self.waiting[0] if self.waiting else None

    @property
    def not_granted(self) -> list[ReconfigurationRequest]:
        """All that was asked for and has not had its turn."""
        return self.waiting if self.awaits is None else [*self.waiting, self.awaits]

    @property
    def notices_left(self) -> bool:
        """Whether the run file is to ask for something yet."""
        return bool(self._notices)

    def steps_left(self, step: int) -> float:
        """After `step` steps: until the run file asks for something, or else to the run's end. In
        steps of as many samples as the next one has."""
        train = self._config.train
        until = self._notices[0].at_step if self._notices else train.last_step(step)
        return steps_between(train, step, until)

    # ---- requests from outside

    def of_operator(
        self, asked: ResizeRequest | ReplaceRequest, now_s: float
    ) -> ReconfigurationRequest:
        """What an operator wants; raises RequestRefused where the run file does not allow it."""
        if isinstance(asked, ReplaceRequest):
            return ReconfigurationRequest(OPERATOR, now_s, replace=asked.replace)
        if (asked.layout is None) == (asked.workers is None):
            raise RequestRefused("resize wants either a layout or a number of workers")
        return ReconfigurationRequest(OPERATOR, now_s, self._allowed(asked.layout, asked.workers))

    def of_notice(self, notice: NoticeSection, now_s: float) -> ReconfigurationRequest:
        """What a scripted notice asks for; raises RequestRefused as `of_operator` does."""
        origin = f"step {notice.at_step}"
        if notice.replace is not None:
            return ReconfigurationRequest(origin, now_s, replace=notice.replace)
        return ReconfigurationRequest(origin, now_s, self._allowed(*_wished(notice)))

    def due(self, step: int) -> list[NoticeSection]:
        """The scripted notices that are raised when step `step` has been done, each once."""
        found = []
        while self._notices and self._notices[0].at_step <= step:
            found.append(self._notices.pop(0))
        return found

    def skip(self, step: int) -> None:
        """`step` steps were done before this start, and what the run file wanted until then; what
        it asked for last is still the bound for what grows by itself."""
        for notice in self.due(step - 1):
            try:
                layout = self.of_notice(notice, 0.0).layout
            except RequestRefused:
                continue
            if layout is not None:
                self.asked = layout.workers

    def _allowed(self, layout: Layout | str | None, workers: int | None) -> Layout:
        try:
            if isinstance(layout, str):
                layout = Layout.parse(layout)
            layout = allowed_layout(self._config, layout, workers)
        except ConfigError as error:
            raise RequestRefused(str(error)) from error
        try:
            self._check_layout(layout)
        except ConfigError as error:
            raise RequestRefused(f"layout {layout}: {error}") from error
        return layout

    # ---- the queue

    def add(self, request: ReconfigurationRequest) -> ReconfigurationRequest | None:
        """Queues a request, in the place of one that it overtakes, which is returned."""
        for position, earlier in enumerate(self.waiting):
            if request.overtakes(earlier):
                self.waiting[position] = request
                return earlier
        self.waiting.append(request)
        return None

    def withdraw_before(self, later: ReconfigurationRequest) -> list[ReconfigurationRequest]:
        """Takes out, and returns, what need not be granted any more once a later layout is asked
        for."""
        keep = [each for each in self.waiting if not later.overtakes(each)]
        withdrawn = [each for each in self.not_granted if each not in keep]
        self.waiting, self.awaits = keep, None
        return withdrawn

    def had_its_turn(self, request: ReconfigurationRequest) -> None:
        """Of one that nobody asked for the queue knows nothing."""
        if request is self.first:
            self.waiting.pop(0)
        if request.asked_for and request.layout is not None:
            self.awaits = None

    def put_back(self, request: ReconfigurationRequest) -> None:
        """A request whose handoff was called off waits for its next turn, before all others; not
        where a later one has overtaken it meanwhile, nor where the run is to end."""
        if not self._is_over and not any(later.overtakes(request) for later in self.waiting):
            self.waiting.insert(0, request)

    def clear(self) -> None:
        """The run is to end: nothing is asked for any more, by the run file neither."""
        self._is_over = True
        self.waiting.clear()
        self.awaits = None
        self._notices.clear()


def noticed_layout(config: RunConfig, notice: NoticeSection) -> Layout:
    """The layout that a scripted notice leads to. Raises ConfigError as `allowed_layout`."""
    return allowed_layout(config, *_wished(notice))


def _wished(notice: NoticeSection) -> tuple[Layout | None, int | None]:
    return None if notice.layout is None else notice.layout.layout(), notice.workers


def allowed_layout(config: RunConfig, layout: Layout | None, workers: int | None) -> Layout:
    """The layout, or the one that is preferred for so many workers; raises ConfigError where the
    run file does not allow it."""
    most = config.workers.max
    choice = ", ".join(str(one) for one in config.layouts_listed if one.workers <= most)
    if layout is None:
        assert workers is not None
        layout = next(iter(config.allowed_layouts(workers)), None)
        if layout is None:
            raise ConfigError(f"no layout of {workers} workers is allowed; allowed are {choice}")
    if layout.workers > most:
        wants = f"layout {layout} wants {layout.workers} workers, workers.max is {most}"
        raise ConfigError(f"{wants}; allowed are {choice}")
    if layout not in config.allowed_layouts(layout.workers):
        raise ConfigError(f"layout {layout} is not allowed; allowed are {choice}")
    return layout
