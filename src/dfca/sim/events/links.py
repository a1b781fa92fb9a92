"""What the world does to messages: links that go down and up, uplinks that queue, loss, repeats, delays.

**Links.** A pair of neighbours has a link, which is up while both are there and no partition separates them. Each time
that it comes up it begins a new epoch; what is on its way in an older one is lost. Both ends notice at once when it
comes up, and `Link.retry_s` after it went down (the time of a failure detector).

**Small messages** (all but `messages.LARGE`) arrive in order within an epoch. A lost one is repeated after `retry_s`;
if it is lost `TRIES` times, the link is declared down at both ends, and comes up again later.

**Models** leave through the sender's uplink one after the other. An `Update`, which nobody asked for, replaces an older
one of the same cluster to the same receiver that has not left, and may be lost, arrive twice, or arrive broken. A model
that somebody asked for is repeated until it arrives, or the link goes down; a broken one fails its checksum and counts
as lost. A server's uplink is not shared: a download takes its client's bandwidth.

All draws have names (`world.draw`), and nothing is drawn where the probability is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from dfca.core.state import Message
from dfca.peer.records.messages import LARGE, BankCopy, Candidate, Centre, Copy, Report, Served, Update, models
from dfca.sim.events.books import RunLog
from dfca.sim.events.clock import DELIVER, DEPART, NOTICE, Clock, Event
from dfca.sim.events.world import SERVER, World, draw

TRIES = 30
"""Losses in a row that break a link; at 50 % loss, that happens to one message in 10**9."""
REOPEN_S = 1.0
"""After how long a link that broke comes up again, where `retry_s` is 0."""
_LARGE = frozenset(LARGE)
_new = tuple.__new__
_FACTS = ("live", "believed", "here", "cuts", "outboxes", "sending", "arrivals", "epochs")


class Ends(Protocol):
    """Who is at the ends of the links."""

    def feed(self, i: int, kind: str, *other: int) -> None: ...
    def receive(self, parcel: Parcel, places: Sequence[int], broken: bool) -> None: ...


class Parcel(NamedTuple):
    """A message on its way to one neighbour, or to several where it reaches them at the same time."""

    sender: int
    receivers: tuple[int, ...]
    message: Any
    number: int  # the sender's count of messages, of the first receiver
    epochs: tuple[int, ...]  # of the link to each receiver
    since: float = 0.0  # when it was handed over
    waited_s: float = 0.0  # how long it waited for the uplink
    tries: int = 0  # how often it was repeated
    changes: int = -1  # `Links.epochs` when it left, if all its links were up

    @property
    def link(self) -> tuple[int, int]:
        """The link that it takes, from end to end: of a message to several, the first."""
        return self.sender, self.receivers[0]


class Links:
    """The links between clients, and between clients and a server."""

    def __init__(
        self,
        world: World,
        near: Sequence[Sequence[int]],
        model_bytes: int,
        seed: int,
        clock: Clock,
        books: RunLog,
        payload_bytes: int | None = None,
    ) -> None:
        """near: the neighbours of each client; those of a server, if there is one, come last. payload_bytes: what an
        update or a report takes; None: a model."""
        self.payload_bytes = model_bytes if payload_bytes is None else payload_bytes
        self.world, self.near, self.model_bytes, self.seed = world, near, model_bytes, seed
        self.clock, self.books, self.link, self.faults = clock, books, world.link, world.faults
        self.clients = len(books.sent_by_client)
        self.retry_s = self.link.retry_s
        self.ends: Ends
        self._bandwidths = [*self.link.bandwidths(self.clients), math.inf]  # a server's, which is not shared, last
        self._fails = bool(self.faults.loss or self.faults.corruption)
        self._ordered = self._fails or self.link.spread > 0
        self._plain = not (self._ordered or self.faults.duplication)  # what leaves together arrives together
        self.live: dict[tuple[int, int], int] = {}  # by (end, other end), the epoch of a link that is up
        self.believed: dict[tuple[int, int], int] = {}  # and the epoch that the end believes to be up
        self.here = [False] * len(near)
        self.cuts: set[int] = set()
        self.epochs = 0  # how often a link came up or went down
        self.outboxes: list[dict[tuple[int, int, int], Parcel]] = [{} for _ in near]  # what waits for each uplink
        self.sending = [0] * len(near)
        self.arrivals: dict[tuple[int, int], float] = {}  # by (sender, receiver), when the last small message arrives
        self._sides: list[list[int]] = []
        self._last_epochs: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(-1, (), ())] * len(near)

    # Up and down.

    def arrive(self, i: int) -> None:
        """Note that a participant is there."""
        self.here[i] = True
        for peer in self.near[i]:
            self._review(i, peer)

    def leave(self, i: int) -> None:
        """Note that a participant has left, with all that it was about to send."""
        self.here[i] = False
        self.outboxes[i].clear()
        self.sending[i] = 0
        for peer in self.near[i]:
            self.believed.pop((i, peer), None)
            self._review(i, peer)

    def cut(self, number: int, closed: bool) -> None:
        """Begin or end a partition of the world."""
        (self.cuts.add if closed else self.cuts.discard)(number)
        self._set_sides()
        for i in range(self.clients):
            for peer in self.near[i]:
                if i < peer or peer == SERVER:
                    self._review(i, peer)

    def _set_sides(self) -> None:
        cuts = [self.world.partitions[number] for number in sorted(self.cuts)]
        self._sides = [[*cut.sides(self.clients), cut.server_side(self.clients)] for cut in cuts]  # the server's last

    def _review(self, i: int, peer: int) -> None:
        """Take a link up or down with what the world is now. A link that loses everything is never up."""
        up = self.here[i] and self.here[peer] and self.faults.loss < 1
        up = up and all(side[i] == side[peer] for side in self._sides)
        if up and (i, peer) not in self.live:
            self._open(i, peer)
        elif not up and (i, peer) in self.live:
            self._close(i, peer)

    def _open(self, i: int, peer: int) -> None:
        self.epochs += 1
        ends = sorted(((i, peer), (peer, i)))
        for end in ends:
            self.live[end] = self.epochs
            self.arrivals.pop(end, None)
        for end in ends:
            if end in self.believed:
                self.ends.feed(end[0], "disconnected", end[1])
        for end in ends:
            self.believed[end] = self.epochs
            self.ends.feed(end[0], "connected", end[1])

    def _close(self, i: int, peer: int, at_once: bool = False) -> None:
        self.epochs += 1
        epoch = self.live.pop((i, peer))
        del self.live[peer, i]
        for end in ((i, peer), (peer, i)):
            outbox = self.outboxes[end[0]]
            for key in [key for key in outbox if key[0] == end[1]]:
                self._lose(outbox.pop(key))
            if at_once or not self.retry_s:
                self._notice(*end, epoch)
            elif self.believed.get(end) == epoch:
                self.clock.push(self.clock.now + self.retry_s, NOTICE, "down", *end, epoch)

    def _notice(self, i: int, peer: int, epoch: int) -> None:
        """Notify a participant that a link went down, unless it knows, or has left."""
        if self.believed.get((i, peer)) == epoch:
            del self.believed[i, peer]
            self.ends.feed(i, "disconnected", peer)

    def on_notice(self, event: Event) -> None:
        """Handle an event of the failure detector."""
        what, i, peer, epoch = event[3:]
        if what == "down":
            self._notice(i, peer, epoch)
        elif what == "up":
            self._review(i, peer)
        elif self.live.get((i, peer)) == epoch:
            self._close(i, peer, at_once=True)
            self.clock.push(self.clock.now + (self.retry_s or REOPEN_S), NOTICE, "up", i, peer, epoch)

    def _break(self, parcel: Parcel, after_s: float) -> None:
        """Declare a link down: a message could not be delivered."""
        self.clock.push(self.clock.now + after_s, NOTICE, "broken", *parcel.link, parcel.epochs[0])

    # Sending.

    def send(self, i: int, receivers: tuple[int, ...], message: Any, number: int) -> None:
        """Take over a message to some neighbours, with numbers from `number` on; those out of reach do not get it."""
        large, epochs = type(message) in _LARGE, self._epochs_of(i, receivers)
        at_once = not large or (type(message) is Update and self._bandwidths[i] == math.inf)
        if self._plain and at_once and 0 not in epochs:
            parcel = _new(Parcel, (i, receivers, message, number, epochs, self.clock.now, 0.0, 0, self.epochs))
            if large:
                self._note_update("send", parcel, 1)
            self.clock.push(self.clock.now + self.link.latency_s, DELIVER, parcel, False)
            return
        for peer, epoch in zip(receivers, epochs, strict=True):
            parcel = _new(Parcel, (i, (peer,), message, number, (epoch,), self.clock.now, 0.0, 0, -1))
            number += 1
            if not large:
                if epoch:
                    self._send_small(parcel)
            elif not epoch:
                self._lose(parcel)
            else:
                if isinstance(message, Copy | BankCopy):
                    self._note("answer", parcel)
                self._enqueue(parcel)

    def _epochs_of(self, i: int, receivers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the epochs of the links to some neighbours, 0 where one is down; most messages go to the same ones."""
        changes, whom, known = self._last_epochs[i]
        if changes != self.epochs or whom != receivers:
            known = tuple([self.live.get((i, peer), 0) for peer in receivers])
            self._last_epochs[i] = (self.epochs, receivers, known)
        return known

    def _send_small(self, parcel: Parcel) -> None:
        link = parcel.link
        delay = self.link.latency(self.seed, *link, parcel.number)
        if self._fails:
            tries = 0
            while self._fail(parcel, tries):
                tries += 1
                if tries == TRIES:
                    if self.arrivals.get(link) != math.inf:
                        self.arrivals[link] = math.inf  # nothing overtakes it in this epoch
                        self._break(parcel, TRIES * self.retry_s)
                    return
            delay += tries * self.retry_s
        at = self.clock.now + delay
        if self._ordered:
            at = max(at, self.arrivals.get(link, 0.0))
            if at == math.inf:
                return
            self.arrivals[link] = at
        self.clock.push(at, DELIVER, parcel, False)

    def _fail(self, parcel: Parcel, tries: int) -> bool:
        """Draw whether a message that will be repeated gets lost, or broken."""
        sender, receiver = parcel.link
        for share, name, kind in (
            (self.faults.loss, "loss", "lost"),
            (self.faults.corruption, "corruption", "corrupt"),
        ):
            if share and draw(self.seed, name, sender, receiver, parcel.number, tries) < share:
                self.books.note(self.clock.now, kind, receiver, sender)
                return True
        return False

    def _enqueue(self, parcel: Parcel) -> None:
        """Hand a model to the uplink, behind what waits there."""
        i, message = parcel.sender, parcel.message
        if self._bandwidths[i] == math.inf:
            self._travel(parcel)
            return
        (peer,) = parcel.receivers
        key = (peer, message.message.cluster, 0) if type(message) is Update else (peer, -1, parcel.number)
        outbox = self.outboxes[i]
        if key in outbox:
            self._note("overtaken", outbox[key])
        if type(message) is Update:
            self._note_update("queue", parcel)
        else:
            self._note("queue", parcel)
        outbox[key] = parcel
        if not self.sending[i]:
            self._next_departure(i)

    def _next_departure(self, i: int) -> None:
        outbox, clock = self.outboxes[i], self.clock
        self.sending[i] = 0
        if outbox:
            parcel = outbox.pop(next(iter(outbox)))
            message, size = parcel.message, self.payload_bytes
            if type(message) is Update:
                size += 8 * len(message.offers)
            elif type(message) is not Report:
                size = self.model_bytes
            size *= models(message)
            clock.push(clock.now + size / self._bandwidths[i], DEPART, parcel, False)
            self.sending[i] = clock.made

    def on_depart(self, event: Event) -> None:
        """Move a model off the uplink, or begin to repeat one."""
        parcel, again = event[3], event[4]
        i, (peer,), message, number, epochs, since, _, tries, _ = parcel
        up = self.live.get((i, peer)) == epochs[0]
        if again:
            if up:
                self._enqueue(parcel)
        elif self.sending[i] == event[2]:  # else its sender has left
            if up:
                waited_s = self.clock.now - since
                self._travel(_new(Parcel, (i, (peer,), message, number, epochs, since, waited_s, tries, -1)))
            else:
                self._lose(parcel)
            self._next_departure(i)

    # On the way.

    def _travel(self, parcel: Parcel) -> None:
        """Put a model on its way, through what the world does to it."""
        i, (peer,), message, number, _, _, _, tries, _ = parcel
        clock, seed, faults = self.clock, self.seed, self.faults
        if type(message) is Update:
            self._note_update("send", parcel, 1)
        else:
            self._note_departure(parcel)
        delay = self.link.latency(seed, i, peer, number + tries * 1_000_003)
        if i == SERVER:
            delay += models(message) * self.model_bytes / self._bandwidths[peer]
        broken = False
        if type(message) is not Update:
            if self._fails and self._fail(parcel, tries):
                self._repeat(parcel)
                return
        else:
            if faults.loss and draw(seed, "loss", i, peer, number, tries) < faults.loss:
                self._lose(parcel)
                return
            if faults.corruption:
                broken = draw(seed, "corruption", i, peer, number, tries) < faults.corruption
            if faults.duplication and draw(seed, "duplication", i, peer, number) < faults.duplication:
                clock.push(clock.now + self.link.latency(seed, i, peer, -number), DELIVER, parcel, broken)
        clock.push(clock.now + delay, DELIVER, parcel, broken)

    def _repeat(self, parcel: Parcel) -> None:
        """Send again after the time that an acknowledgement takes."""
        if parcel.tries + 1 >= TRIES:
            self._break(parcel, self.retry_s)
        else:
            later = parcel._replace(tries=parcel.tries + 1)
            self.clock.push(self.clock.now + self.retry_s, DEPART, later, True)

    def on_deliver(self, event: Event) -> None:
        """Deliver a message, but over links that have gone down since it left."""
        parcel, broken = event[3], event[4]
        places: Sequence[int] = range(len(parcel.receivers))
        if parcel.changes == self.epochs:
            pass  # all its links are as they were
        elif len(places) > 1 or self.live.get(parcel.link) != parcel.epochs[0]:
            ends = zip(parcel.receivers, parcel.epochs, strict=True)
            up = [self.live.get((parcel.sender, peer)) == epoch for peer, epoch in ends]
            if type(parcel.message) in _LARGE:
                for place in places:
                    if not up[place]:
                        self._lose(parcel, place)
            places = [place for place in places if up[place]]
        if broken and places:
            self._note("corrupt", parcel, at_receiver=True)
        self.ends.receive(parcel, places, broken)

    # The books.

    def _lose(self, parcel: Parcel, place: int = 0) -> None:
        self._note("lost", parcel, at_receiver=True, place=place)

    def _note(self, kind: str, parcel: Parcel, at_receiver: bool = False, number: int = -1, place: int = 0) -> None:
        i, peer = parcel.sender, parcel.receivers[place]
        if at_receiver:
            i, peer = peer, i
        self.books.note(self.clock.now, kind, i, peer, *_about(parcel.message), number)

    def _note_update(self, kind: str, parcel: Parcel, number: int = -1) -> None:
        inner = parcel.message.message
        self.books.note_update(
            self.clock.now, kind, parcel.sender, parcel.receivers, inner.cluster, inner.round, number
        )

    def _note_departure(self, parcel: Parcel) -> None:
        message = parcel.message
        if isinstance(message, Candidate | Centre):
            self._note("candidacy", parcel)
        elif parcel.tries:
            self._note("repeat", parcel, number=models(message))
        elif not isinstance(message, Copy | BankCopy) and models(message):
            self._note("send", parcel, number=models(message))

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs."""
        return {name: getattr(self, name) for name in _FACTS}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name in _FACTS:
            setattr(self, name, state[name])
        self._set_sides()


def _about(message: Any) -> tuple[int, int]:
    """Return the cluster and the round that a message is about, -1 where there is none."""
    if type(message) is Candidate or type(message) is Centre:
        return -1, -1
    inner: Message | None = None if type(message) is Served else message.message
    return (-1, message.round) if inner is None else (inner.cluster, inner.round)


def corrupted(message: Message, seed: int, receiver: int) -> Message:
    """Break a payload as a bad link does: a NaN in it, or numbers missing at the end."""
    if draw(seed, "corrupt", message.sender, receiver, message.cluster, message.round) < 0.5:
        return replace(message, model=message.model[:-1])
    if not message.model.is_floating_point():
        return replace(message, model=message.model.flip(0)[1:])
    broken = message.model.clone()
    if len(broken):
        broken[len(broken) // 2] = math.nan
    return replace(message, model=broken)
