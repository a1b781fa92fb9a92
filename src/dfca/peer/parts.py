"""What a part of a peer is given: what it may read (`PeerView`), where it puts what is to leave (`Outbox`).

A part owns its fields and knows no other part. It is called by its peer (`peer.py`), which hands it itself as a
`PeerView`; what it wants done elsewhere it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from torch import Tensor

from dfca.core.client import participates
from dfca.core.exchange import Rules
from dfca.core.rules.relay import Offer
from dfca.core.state import ClientState, Message
from dfca.peer.inbox import Neighbour
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.messages import Call, Hello
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Job, Ready
from dfca.peer.waves.deadline import AnswerTime
from dfca.peer.waves.wave import Wave

_participates = lru_cache(4096)(participates)  # a waiting peer asks this again for every message


class PeerView(Protocol):
    """What a part may read of its peer. None of it is the part's to change."""

    id: int  # its number
    incarnation: int  # how often it has begun before
    now: float  # its time, which never goes back
    options: PeerOptions  # what does not change about it
    rules: Rules  # how it merges what it receives
    neighbours: tuple[int, ...]  # those of the graph, in reach or not
    links: dict[int, Neighbour]  # the neighbours in reach, and what they said
    copies: ClientState  # its models, and what is known of each
    lineage: Lineage  # the elections and surveys that its models come from
    job: Job | None  # the long job that runs
    answer_time: AnswerTime  # how long answers take
    most_peers: int  # how many peers there can be

    @property
    def bank(self) -> Tensor | None:
        """Its models (m, P), None for none."""

    @property
    def round(self) -> int:
        """The round that it trains or will train next."""

    @property
    def open_clusters(self) -> list[int]:
        """The clusters that are not closed."""

    @property
    def open_models(self) -> Tensor | None:
        """The models of these, (k, P)."""

    @property
    def holds_out(self) -> bool:
        """Whether samples are held out of training now."""

    @property
    def wave(self) -> Wave | None:
        """The election or survey that it takes part in."""

    def will_take(self, lineage: Lineage) -> bool:
        """Whether its lineage will be this one once a survey takes effect."""

    def hello(self) -> Hello:
        """What it says of itself."""


class Outbox:
    """What is to leave a participant, until its driver takes it (`Machine.ready`)."""

    def __init__(self, links: dict[int, Neighbour]) -> None:
        self.links = links  # the neighbours in reach: nothing is sent to others
        self.refused: Counter[str] = Counter()  # messages that could not be used, by reason
        self.ready = Ready()  # what has gathered since the driver looked

    def take(self) -> Ready:
        """Return what has gathered, and forget it."""
        ready, self.ready = self.ready, Ready()
        return ready

    def send(self, neighbour: int, message: Any) -> None:
        """Send a message to a neighbour, if it is in reach."""
        if neighbour in self.links:
            self.ready.messages.append((neighbour, message))

    def broadcast(self, *messages: Any, but: int | None = None, to: Sequence[int] | None = None) -> None:
        """Send messages to all neighbours in reach, to some of them, or to all but one."""
        neighbours = (self.links if to is None else to) if but is None else [n for n in self.links if n != but]
        if len(messages) == 1:
            (message,) = messages
            self.ready.messages += [(n, message) for n in neighbours]
        else:
            self.ready.messages += [(n, message) for n in neighbours for message in messages]

    def ask(self, job: Job) -> None:
        """Ask the driver for work."""
        self.ready.work.append(job)

    def save(self) -> None:
        """Save the peer before any message leaves."""
        self.ready.save = True

    def note(self, kind: str, other: int = -2, cluster: int = -1, round: int = -1, number: float = 0.0) -> None:
        """Note what happened: see `NOTES`."""
        self.ready.noted.append((kind, other, cluster, round, number))

    def refuse(self, reason: str, sender: int, cluster: int = -1, round: int = -1) -> None:
        """Count and note a message that cannot be used."""
        self.refused[reason] += 1
        self.note("refused", sender, cluster, round)


class Part:
    """A part of a peer. Its fields are written by itself only, and stored by name among those of the whole peer."""

    STORED_AS: ClassVar[dict[str, str]] = {}  # fields that checkpoints know by another name, since 0.1
    NOT_STORED: ClassVar[frozenset[str]] = frozenset({"out"})

    def __init__(self, out: Outbox) -> None:
        self.out = out  # where it puts what is to leave

    def save(self) -> dict[str, Any]:
        """Return its fields, by the names that checkpoints know."""
        return {self.STORED_AS.get(n, n): value for n, value in vars(self).items() if n not in self.NOT_STORED}

    def restore(self, stored: dict[str, Any]) -> None:
        """Take its fields out of those of the whole peer; what an older version did not store stays as it is."""
        for name in vars(self).keys() - self.NOT_STORED:
            if (known := self.STORED_AS.get(name, name)) in stored:
                setattr(self, name, stored[known])


def takes_part(options: PeerOptions, peer: int, round: int) -> bool:
    """Return whether a peer trains in a round, or sits it out."""
    return options.method.participation >= 1 or _participates(options.seed, peer, round, options.method.participation)


def is_silent(links: dict[int, Neighbour]) -> bool:
    """Return whether a neighbour in reach has not said hello yet."""
    return any(known.hello is None for known in links.values())


def copy_of(at: PeerView, cluster: int) -> Message:
    """Copy one model as it is now, with how fresh it is."""
    assert at.bank is not None
    copies, layout = at.copies, at.rules.layout
    offer = Offer(at.id, copies.stamps[cluster], copies.origins[cluster])
    model = at.bank[cluster].clone()
    model = model if layout is None else layout.hide(model)
    return Message(at.id, cluster, at.round, at.rules.degree, model, offer, copies.updates[cluster])


def wave_fields(at: PeerView, call: Call | None) -> dict[str, Any]:
    """Make the fields of a wave that do not depend on what it is for."""
    options = at.options
    return {
        "id": at.id,
        "seed": options.seed,
        "incarnation": at.incarnation,
        "clusters": options.clusters,
        "options": options.method.election,
        "quorum": options.method.quorum,
        "answer_time": at.answer_time,
        "size": options.size,
        "dtype": options.dtype,
        "base": at.lineage,
        "call": call,
        "links": set(at.links),
        "most": at.most_peers,
    }
