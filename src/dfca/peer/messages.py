"""What peers say to each other. A message is a plain record; `problem` says what is wrong with one, whatever came.

Small messages arrive in order within one epoch of a link. Those that carry a model (`Update`, `BankCopy`, `Copy`,
`Candidate`, `Centre`, `Served`) are large and may be overtaken by small ones; of `Update`s, the newest per sender and
cluster is the one that counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dfca.core.client import Message
from dfca.core.election import Tally
from dfca.core.relay import Offer
from dfca.peer.lineage import MOST_SLOTS, Lineage, is_lineage

MOST_ATTEMPT = 2**32
"""No election is begun again as often."""
MOST_TURNS = 2**14
MOST_PEERS = 2**20
"""No swarm has more."""

# Rounds.


class Hello(NamedTuple):
    """Who the sender is now: sent when a link opens, and when something of it changes.

    incarnation: counts the lives of the sender; round: the next that it trains; clusters: the models that it holds,
    0 for none.
    """

    incarnation: int
    round: int
    clusters: int
    lineage: Lineage = ()


class Update(NamedTuple):
    """A model that the sender trained, in `message.round`; one of `parts` of that round.

    age_s: how long ago it was trained, when it leaves; freshness: by cluster, the newest round of a local update that
    the sender knows of; offers: the copies that it would hand on (`core.relay`).
    """

    message: Message
    parts: int
    lineage: Lineage = ()
    age_s: float = 0.0
    freshness: tuple[int, ...] = ()
    offers: tuple[tuple[int, Offer], ...] = ()


class Nothing(NamedTuple):
    """The sender ended a round without a model to send."""

    round: int
    lineage: Lineage = ()
    freshness: tuple[int, ...] = ()
    offers: tuple[tuple[int, Offer], ...] = ()


# Relay and join.


class CopyRequest(NamedTuple):
    """Asks for the receiver's copy of one model."""

    cluster: int
    lineage: Lineage = ()


class Copy(NamedTuple):
    """The copy that was asked for; message.offer says how fresh it is."""

    message: Message
    lineage: Lineage = ()


class BankRequest(NamedTuple):
    """Asks for the receiver's models of some clusters; None: of all."""

    clusters: tuple[int, ...] | None = None


class BankCopy(NamedTuple):
    """One of the models that were asked for; round: the sender's; clusters: how many models it holds."""

    message: Message
    round: int
    clusters: int
    lineage: Lineage = ()


class Declined(NamedTuple):
    """The sender cannot send what it was asked for: the copy of a cluster, or its bank (None)."""

    cluster: int | None = None


# Elections.


class Key(NamedTuple):
    """Names a wave; a larger one extinguishes a smaller one.

    attempt: how often the election was begun again; decided: the turns that its root knows; lot: minus the root's lot.
    """

    attempt: int
    decided: int
    lot: int
    root: int
    incarnation: int


class Call(NamedTuple):
    """What a by-election is for: the clusters that nobody trains, among so many; None for the election of a start."""

    lost: tuple[int, ...]
    clusters: int


class Turn(NamedTuple):
    """A turn that was decided; the candidate is None where everybody had stood."""

    candidate: int | None
    accepted: bool
    slot: int = -1


class Probe(NamedTuple):
    """Asks a neighbour to join a wave, which extends a lineage."""

    key: Key
    base: Lineage
    call: Call | None = None


class Count(NamedTuple):
    """A subtree has answered: its peers, those that may vote, and the turns that the sender itself knows."""

    key: Key
    size: int
    ready: int
    log: tuple[Turn, ...] = ()


class Refuse(NamedTuple):
    """The sender takes no part in a wave, or no longer."""

    key: Key


class Open(NamedTuple):
    """The wave is complete: turns begin, after those that were decided before."""

    key: Key
    voters: int
    log: tuple[Turn, ...]


class Centre(NamedTuple):
    """The model of a centre that was accepted before the receiver joined."""

    key: Key
    place: int
    candidate: int
    model: Tensor


class Bid(NamedTuple):
    """The best bid of a subtree; None: nobody there may stand."""

    key: Key
    turn: int
    value: float
    candidate: int | None


class Stand(NamedTuple):
    """Asks the peer that made the best bid to stand."""

    key: Key
    turn: int
    candidate: int


class Candidate(NamedTuple):
    """The candidate's model, and its own gain (`core.election.count`)."""

    key: Key
    turn: int
    candidate: int
    gain: float
    model: Tensor


class Votes(NamedTuple):
    """The votes of a subtree on a candidate, summed."""

    key: Key
    turn: int
    tally: Tally


class Decision(NamedTuple):
    """What came of a turn; done: it was the last."""

    key: Key
    turn: int
    outcome: Turn
    done: bool


class Alarm(NamedTuple):
    """No model fits `origin` any more (or again one does); number: the newest of an origin counts."""

    origin: int
    number: int
    raised: bool
    lineage: Lineage = ()


# A server and its clients.


class Served(NamedTuple):
    """The server's models (m, P), with the round that they begin."""

    round: int
    bank: Tensor


class Report(NamedTuple):
    """What a client trained in a round; None where its training diverged."""

    round: int
    message: Message | None


LARGE = (Update, Copy, BankCopy, Centre, Candidate, Served, Report)
"""Messages that carry models."""


def scalars(message: Any) -> int:
    """Count the numbers of a message besides its models."""
    total = 0
    for value in message:
        if isinstance(value, Tensor | Message):
            continue
        if isinstance(value, tuple):
            total += scalars(value)
        elif value is not None:
            total += 1
    return total


def models(message: Any) -> int:
    """Count the models that a message carries."""
    if isinstance(message, Served):
        return len(message.bank)
    if isinstance(message, Report):
        return int(message.message is not None)
    return int(isinstance(message, LARGE))


# What may come from anybody.


def _is_int(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


def _is_model(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _is_message(value: Any) -> bool:
    return (
        type(value) is Message
        and type(value.sender) is int
        and _is_int(value.cluster)
        and _is_int(value.round, -1)
        and _is_int(value.degree)
        and _is_int(value.updates)
        and _is_model(value.model)
        and (value.offer is None or _is_offer(value.offer))
    )


def _is_offer(value: Any) -> bool:
    return type(value) is Offer and len(value) == 3 and all(type(part) is int for part in value)


def _is_offers(value: Any) -> bool:
    return type(value) is tuple and all(
        type(pair) is tuple and len(pair) == 2 and _is_int(pair[0]) and _is_offer(pair[1]) for pair in value
    )


def _is_ints(value: Any) -> bool:
    return type(value) is tuple and all(type(each) is int for each in value)


def _is_key(value: Any) -> bool:
    return (
        type(value) is Key
        and all(type(part) is int for part in value)
        and 0 <= value.attempt <= MOST_ATTEMPT
        and 0 <= value.decided <= MOST_TURNS
    )


def _is_turn(value: Any) -> bool:
    return (
        type(value) is Turn
        and (value.candidate is None or type(value.candidate) is int)
        and type(value.accepted) is bool
        and type(value.slot) is int
        and -1 <= value.slot < MOST_SLOTS
        and value.accepted == (value.slot >= 0)
        and not (value.accepted and value.candidate is None)
    )


def _is_log(value: Any) -> bool:
    return type(value) is tuple and len(value) <= MOST_TURNS and all(_is_turn(each) for each in value)


def _is_call(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not Call or not _is_ints(value.lost) or not _is_int(value.clusters):
        return False
    lost = value.lost
    return value.clusters <= MOST_SLOTS and lost == tuple(sorted({j for j in lost if 0 <= j < value.clusters}))


def _is_tally(value: Any) -> bool:
    if type(value) is not Tally or not all(_is_int(each) for each in value[:3]):
        return False
    return all(_is_ints(each) and len(each) == len(value.totals) for each in value[3:])


_CHECKS: dict[type, Any] = {
    Hello: lambda m: _is_int(m.incarnation) and _is_int(m.round) and _is_int(m.clusters) and is_lineage(m.lineage),
    Update: lambda m: (
        _is_message(m.message)
        and _is_int(m.parts, 1)
        and is_lineage(m.lineage)
        and _is_number(m.age_s)
        and m.age_s >= 0
        and _is_ints(m.freshness)
        and _is_offers(m.offers)
    ),
    Nothing: lambda m: _is_int(m.round) and is_lineage(m.lineage) and _is_ints(m.freshness) and _is_offers(m.offers),
    CopyRequest: lambda m: _is_int(m.cluster) and is_lineage(m.lineage),
    Copy: lambda m: _is_message(m.message) and m.message.offer is not None and is_lineage(m.lineage),
    BankRequest: lambda m: m.clusters is None or (_is_ints(m.clusters) and len(m.clusters) <= 4096),
    BankCopy: lambda m: (
        _is_message(m.message)
        and m.message.offer is not None
        and _is_int(m.round)
        and _is_int(m.clusters, 1)
        and is_lineage(m.lineage)
    ),
    Declined: lambda m: m.cluster is None or _is_int(m.cluster),
    Probe: lambda m: _is_key(m.key) and is_lineage(m.base) and _is_call(m.call),
    Count: lambda m: (
        _is_key(m.key)
        and _is_int(m.size, 1)
        and _is_int(m.ready)
        and m.ready <= m.size <= MOST_PEERS
        and _is_log(m.log)
    ),
    Refuse: lambda m: _is_key(m.key),
    Open: lambda m: _is_key(m.key) and _is_int(m.voters) and m.voters <= MOST_PEERS and _is_log(m.log),
    Centre: lambda m: _is_key(m.key) and _is_int(m.place) and type(m.candidate) is int and _is_model(m.model),
    Bid: lambda m: (
        _is_key(m.key) and _is_int(m.turn) and _is_number(m.value) and (m.candidate is None or type(m.candidate) is int)
    ),
    Stand: lambda m: _is_key(m.key) and _is_int(m.turn) and type(m.candidate) is int,
    Candidate: lambda m: (
        _is_key(m.key) and _is_int(m.turn) and type(m.candidate) is int and _is_number(m.gain) and _is_model(m.model)
    ),
    Votes: lambda m: _is_key(m.key) and _is_int(m.turn) and _is_tally(m.tally),
    Decision: lambda m: _is_key(m.key) and _is_int(m.turn) and _is_turn(m.outcome) and type(m.done) is bool,
    Alarm: lambda m: type(m.origin) is int and _is_int(m.number) and type(m.raised) is bool and is_lineage(m.lineage),
    Served: lambda m: _is_int(m.round) and isinstance(m.bank, Tensor) and m.bank.dim() == 2,
    Report: lambda m: _is_int(m.round) and (m.message is None or _is_message(m.message)),
}


_last_sound: Any = None
"""The last message that was well formed: in one process the same object goes to many receivers in a row."""


def well_formed(message: Any) -> bool:
    """Return whether something that came is a message, with fields of the right types; anything may come."""
    global _last_sound
    if message is _last_sound and message is not None:
        return True
    check = _CHECKS.get(type(message))
    if check is None or not check(message):
        return False
    _last_sound = message
    return True
