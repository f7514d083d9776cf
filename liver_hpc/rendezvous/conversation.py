"""What agents and workers and the coordinator say to each other, which outlives connections.

Each has a conversation of its own with the coordinator; those of a node share the agent's
connection. Each end numbers what it sends, and keeps it until the other one has said that it is
safe there. A connection that breaks is made again, and what may have been lost is said again: each
message is taken once, and in order. The one who calls is the agent (`Line`); on the other end may
be another coordinator by then, which knows from the run's journal what was said.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from liver_hpc.clock import Clock, Deadline
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import DeadlineError, LiverError, ProtocolError
from liver_hpc.protocol.messages import AnyMessage, Calls, Exit, Hears, encode
from liver_hpc.rendezvous.channel import (
    ITSELF,
    Channel,
    ChannelClosed,
    Part,
    connect,
)
from liver_hpc.run.directory import CoordinatorAddress, RunDirectory
from liver_hpc.run.epoch import MISSED_AFTER, last_sign, replay_limit_s

LOOK_S = 5.0
"""So often who hears nothing looks whether there is another coordinator."""
_AGAIN_S = 0.2
_NOBODY_S = 0.5
"""The same while there is none to call: each look is a question to a shared file system."""


class Conversation:
    """One end. It makes the parts that somebody else sends; used by one thread at a time.

    who: the worker it is about, or ITSELF. heard: the number of the other end's last message that
    was taken before; None where nothing is known of what was said before on either side, and the
    first number that comes is right. said: what this end has sent before. last: the number of what
    it has said last, 0 before.
    """

    def __init__(
        self, who: int = ITSELF, heard: int | None = 0, said: Iterable[bytes] = ()
    ) -> None:
        self.who = who
        self.heard = heard
        self._goes_on = heard is None
        self._safe = heard or 0
        self._kept = deque(enumerate(said, start=1))
        self.last = len(self._kept)

    def say(self, data: bytes) -> Part:
        """A message that reaches the other end once."""
        self.last += 1
        self._kept.append((self.last, data))
        return Part(data, self.last, self._safe, self.who)

    def tell(self, data: bytes = b"") -> Part:
        """A message that may be lost; without one, what is safe here."""
        return Part(data, 0, self._safe, self.who)

    def keeps(self, number: int) -> bool:
        """Whether something that was said up to here may not be safe at the other end."""
        return bool(self._kept) and self._kept[0][0] <= number

    def lacks(self, heard: int) -> bool:
        """Whether the other end has taken what this one does not know to have sent."""
        return not self._goes_on and heard > self.last

    def resume(self, heard: int) -> Iterator[Part]:
        """What is to be said again over another connection, whose other end has taken all up to
        `heard`."""
        if self._goes_on:  # behind what another one has said
            self._goes_on = False
            kept = [data for _, data in self._kept]
            self._kept, self.last = deque(enumerate(kept, start=heard + 1)), heard + len(kept)
        for number, data in self._kept:
            if number > heard:
                yield Part(data, number, self._safe, self.who)

    def take(self, came: Part) -> bool:
        """Whether what came is new. Raises ProtocolError where something before it is missing."""
        while self._kept and self._kept[0][0] <= came.heard:
            self._kept.popleft()
        if came.number == 0:
            return bool(came.data)
        if self.heard is not None:
            if came.number <= self.heard:
                return False
            if came.number != self.heard + 1:
                raise ProtocolError(f"wanted message {self.heard + 1}, got {came.number}")
        self.heard = came.number
        return True

    def is_safe(self, number: int) -> bool:
        """What was taken up to here need not be kept at the other end, which is told with the next
        part; whether that is news."""
        news = number > self._safe
        self._safe = max(self._safe, number)
        return news


class Line:
    """An agent's end, for itself and for its workers. Any thread may send, one receives, which
    makes the connection again where it breaks.

    was_open: whether a coordinator has ever answered. call: what a connection begins with, but for
    the numbers. limits: it goes on for `coordinator_s` without a coordinator, and for `boot_s`
    longer while another one begins, which shows that it lives, and for what a long journal takes.
    missed: is told after each third of `coordinator_s` without a sign of life of one in the run's
    directory; how often it was.
    """

    def __init__(
        self,
        run: RunDirectory,
        secret: bytes,
        call: Callable[[], Calls],
        clock: Clock,
        limits: DeadlineSection,
    ) -> None:
        self.was_open = False
        self.missed: Callable[[int], None] = lambda times: None
        self._run = run
        self._secret = secret
        self._call = call
        self._clock = clock
        self._limits = limits
        self._saying = threading.RLock()
        self._conversations = {ITSELF: Conversation()}
        # Workers that have ended, and the number of the agent's word that says so.
        self._over: dict[int, int] = {}
        self._to_send: list[Part] = []
        self._owed: set[int] = set()  # whose parts were taken, which the coordinator is to hear
        self._epoch = 0
        self._channel: Channel | None = None
        self._stands = False
        self._broken: ChannelClosed | None = None
        self._closing = threading.Event()
        self._told: Exit | None = None

    def open(self, address: tuple[str, int]) -> None:
        """Calls the coordinator for the first time, or the one after it. Raises ChannelClosed."""
        try:
            self._connect(address, self._limits.control_s)
        except (ChannelClosed, DeadlineError) as error:
            self._call_again(error)

    # ---- what is sent

    def add(self, worker: int) -> None:
        """A conversation that begins."""
        with self._saying:
            self._conversations[worker] = Conversation(worker)

    def forget(self, worker: int) -> None:
        """One that is over. What it has said is kept until all is safe that the agent has said by
        now, its end among that."""
        with self._saying:
            self._over[worker] = self._conversations[ITSELF].last
            self._forget_those_over()

    def _forget_those_over(self) -> None:
        own = self._conversations[ITSELF]
        for worker in [each for each, end in self._over.items() if not own.keeps(end)]:
            del self._over[worker]
            self._conversations.pop(worker, None)
            self._owed.discard(worker)

    def send(self, message: AnyMessage) -> None:
        """Of the agent's own; it reaches the coordinator, or the one after it, once."""
        self.say(encode(message))
        self.flush()

    def say(self, data: bytes, who: int = ITSELF) -> None:
        """As `send`; it goes with the next `flush`."""
        with self._saying:
            part = self._conversations[who].say(data)
            if self._stands:  # else the next connection begins with it
                self._to_send.append(part)

    def tell(self, data: bytes, who: int) -> bool:
        """It may be lost; it goes with the next `flush`, if there is a connection. Returns whether
        there is. Without data it says what is safe."""
        with self._saying:
            if self._stands and who in self._conversations.keys() - self._over.keys():
                self._to_send.append(self._conversations[who].tell(data))
            return self._stands

    def flush(self) -> None:
        """Sends what waits, in one frame."""
        with self._saying:
            parts, self._to_send = self._to_send, []
            told = {part.who for part in parts}
            owed, self._owed = self._owed - told, set()
            parts += [self._conversations[who].tell() for who in owed]
            if parts and self._channel is not None and self._stands:
                self._channel.post(parts)

    # ---- what comes

    @property
    def is_told_to_go(self) -> bool:
        """By a coordinator that it has called: all that comes from now on is that."""
        return self._told is not None

    def receive(self) -> list[tuple[int, bytes]]:
        """What comes next that is new: to whom, and the message; nothing where the connection has
        broken, which the next call makes again.

        Raises ChannelClosed where no coordinator has come for `coordinator_s`, the run has ended,
        or this end was closed.
        """
        if self._broken is not None:
            self._call_again(self._broken)
            self._broken = None
        while True:
            if self._told is not None:
                return [(ITSELF, encode(self._told))]
            assert self._channel is not None, "open comes first"
            try:
                came = self._take(self._channel.receive_parts(LOOK_S))
                if came:
                    return came
            except ChannelClosed as error:
                with self._saying:
                    self._stands, self._to_send = False, []
                self._broken = error
                return []
            except DeadlineError:
                self._look_for_another()

    def close(self) -> None:
        """Idempotent; from any thread."""
        self._closing.set()
        if self._channel is not None:
            self._channel.close()

    # ---- in the thread that receives

    def _take(self, parts: list[Part]) -> list[tuple[int, bytes]]:
        came = []
        with self._saying:
            for part in parts:
                conversation = self._conversations.get(part.who)
                if conversation is not None and conversation.take(part):
                    came.append((part.who, part.data))
                    if part.number and conversation.is_safe(part.number):
                        self._owed.add(part.who)
            self._forget_those_over()
        return came

    def _look_for_another(self) -> None:
        """A coordinator that stands still keeps its connections; another one is in the file."""
        found = self._find()
        if found is not None and found.epoch > self._epoch:
            assert self._channel is not None
            self._channel.close(f"coordinator {found.epoch} has taken over")

    def _find(self) -> CoordinatorAddress | None:
        try:
            return self._run.coordinator()
        except (LiverError, OSError):  # a file system that does not answer now
            return None

    def _has_ended(self) -> bool:
        """Whether the run is known to have."""
        try:
            return self._run.last_outcome() is not None
        except (LiverError, OSError):  # likewise
            return False

    def _call_again(self, lost: LiverError) -> None:
        """Who refuses has proved nothing: after a coordinator's death its port may be anybody's."""
        limits, coordinator_s = self._limits, self._limits.coordinator_s
        limit = Deadline.after(self._clock, coordinator_s, "a coordinator")
        longest_s = limits.successor_s + replay_limit_s(self._run.path)
        longest = Deadline.after(self._clock, longest_s, limit.waits_for)
        patience_s = coordinator_s * MISSED_AFTER
        patience, missed = Deadline.after(self._clock, patience_s, "a sign"), 0
        try_s, sign, why = max(patience_s / 2, LOOK_S), last_sign(self._run.path), lost
        while not self._closing.is_set():
            found = self._find()
            if found is not None and found.epoch >= self._epoch:
                try:
                    # Not all of it: the next one is elsewhere, and a lost host does not refuse.
                    left_s = min(limit.remaining_s(), patience.remaining_s(), try_s)
                    left_s = max(min(left_s, limits.control_s), _AGAIN_S)
                    self._connect((found.host, found.port), left_s)
                    return
                except (ChannelClosed, DeadlineError) as error:
                    why = error
            if self._has_ended():
                raise ChannelClosed(f"the run has ended: {lost}")
            if patience.expired() or limit.expired():
                before, sign = sign, last_sign(self._run.path)
                begins = before != sign is not None and sign[0] > self._epoch
                if begins and not longest.expired():  # it reads what there is
                    left_s = min(coordinator_s, longest.remaining_s())
                    limit = Deadline.after(self._clock, left_s, limit.waits_for)
                elif limit.expired():
                    raise ChannelClosed(f"{limit.error()} after {lost}; the last: {why}")
                elif before == sign is not None:  # else the way to it is broken, and it lives
                    missed += 1
                    self.missed(missed)
                patience = Deadline.after(self._clock, patience_s, patience.waits_for)
            self._closing.wait(_NOBODY_S if found is None else _AGAIN_S)
        raise ChannelClosed(str(lost))

    def _connect(self, address: tuple[str, int], limit_s: float) -> None:
        """Raises ChannelClosed, ChannelRefused, DeadlineError."""
        deadline = Deadline.after(self._clock, limit_s, "the coordinator's control channel")
        channel = connect(address, self._secret, limit_s, deadline.waits_for)
        with self._saying:
            heard = {who: each.heard or 0 for who, each in self._conversations.items()}
        about_itself = heard.pop(ITSELF)
        numbers = {"heard": about_itself, "workers": heard, "epoch": self._epoch}
        try:
            channel.send(self._call().model_copy(update=numbers))
            answer = channel.receive(deadline.remaining_s())
        except (ChannelClosed, DeadlineError):
            channel.close()
            raise
        if isinstance(answer, Exit):  # it wants nothing of this caller any more
            self._told = answer
        elif not isinstance(answer, Hears) or answer.epoch < self._epoch:
            channel.close("it is no coordinator, or not the newest")
            raise ChannelClosed(f"{channel.peer} at {address[0]}:{address[1]}: it said {answer}")
        else:
            self._epoch, self.was_open = answer.epoch, True
        self._channel = channel
        if self._closing.is_set():
            channel.close()
        if isinstance(answer, Hears):
            self._resume(channel, answer)

    def _resume(self, channel: Channel, answer: Hears) -> None:
        """Workers' words come first: an agent speaks of their end."""
        with self._saying:
            parts: list[Part] = []
            for who, conversation in self._conversations.items():
                if who != ITSELF:
                    parts += conversation.resume(answer.workers.get(who, 0))
            parts += self._conversations[ITSELF].resume(answer.heard)
            self._stands = True
            if parts:
                channel.post(parts)
