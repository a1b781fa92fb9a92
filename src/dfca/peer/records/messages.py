"""What peers say to each other. A message is a plain record; `well_formed` says whether what came is one.

Small messages arrive in order within one epoch of a link. Those that carry a model (`Update`, `BankCopy`, `Copy`,
`Candidate`, `Centre`, `Served`) are large and may be overtaken by small ones; of `Update`s, the newest per sender and
cluster is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import call
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

from dfca.core.rules.election import Tally
from dfca.core.rules.merging import EXCESSES, Poll, Survey
from dfca.core.rules.personal import GRID, SWEEPS
from dfca.core.rules.relay import Offer
from dfca.core.state import Message, PushedMessage
from dfca.peer.records.lineage import MOST_SLOTS, Entry, Lineage, is_entry, is_lineage

MOST_ATTEMPT = 2**32  # attempts of one election, at most
MOST_TURNS = 2**14
MOST_ROUND = 2**40  # later rounds are refused
MOST_SURVEYED = 26  # clusters of a survey, at most: no list of a message is longer than 4096
MOST_PEERS = 2**20  # peers of a swarm, at most
MOST_PROOF = 128  # bytes of a signature
MOST_LOSS = 1e30  # curves with a larger loss are refused: sums of losses stay finite

# Types of fields, with what is checked where they come from somebody else.

Natural = Annotated[int, lambda value: type(value) is int and value >= 0]
Positive = Annotated[int, lambda value: type(value) is int and value >= 1]
PeerCount = Annotated[int, lambda value: type(value) is int and 0 <= value <= MOST_PEERS]
Bank = Annotated[Tensor, lambda value: isinstance(value, Tensor) and value.dim() == 2]
Offers = tuple[tuple[Natural, Offer], ...]

# Rounds.


class Hello(NamedTuple):
    """Who the sender is now: sent when a link opens, and when something of it changes.

    incarnation: counts the lives of the sender; round: the next that it trains; clusters: the models that it holds,
    0 for none.
    """

    incarnation: Natural
    round: Natural
    clusters: Natural
    lineage: Lineage = ()


class Update(NamedTuple):
    """A model that the sender trained, in `message.round`; one of `parts` of that round.

    age_s: how long ago it was trained, when it leaves; freshness: by cluster, the newest round of a local update that
    the sender knows of; offers: the copies that it would hand on (`rules.relay`).
    """

    message: Message
    parts: Positive
    lineage: Lineage = ()
    age_s: float = 0.0
    freshness: tuple[int, ...] = ()
    offers: Offers = ()


class Nothing(NamedTuple):
    """The sender ended a round without a model to send."""

    round: Natural
    lineage: Lineage = ()
    freshness: tuple[int, ...] = ()
    offers: Offers = ()


# Relay and join.


class CopyRequest(NamedTuple):
    """Asks for the receiver's copy of one model."""

    cluster: Natural
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
    round: Natural
    clusters: Positive
    lineage: Lineage = ()


class Declined(NamedTuple):
    """The sender cannot send what it was asked for: the copy of a cluster, or its bank (None)."""

    cluster: int | None = None


# Elections.


class Key(NamedTuple):
    """Names a wave; a larger one extinguishes a smaller one.

    attempt: how often the election was begun again; decided: the turns that its root knows; lot: minus the root's lot.
    """

    attempt: Natural
    decided: Natural
    lot: int
    root: int
    incarnation: int


class Call(NamedTuple):
    """What a by-election is for: the clusters that nobody trains, of `clusters`; None for the election of a start.

    closed: the clusters that are (`rules.merging`). survey: it is for a survey of those that are open.
    """

    lost: tuple[int, ...]
    clusters: Natural
    closed: tuple[int, ...] = ()
    survey: bool = False


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
    """A subtree has answered: its peers that warm up, those that have, and the turns that the sender itself knows.

    In a survey: its peers, those that have been polled, and what they say.
    """

    key: Key
    size: PeerCount
    ready: PeerCount
    log: tuple[Turn, ...] = ()
    poll: Poll | None = None


class Refuse(NamedTuple):
    """The sender takes no part in a wave, or no longer."""

    key: Key


class Open(NamedTuple):
    """The wave is complete: turns begin, after those that were decided before.

    first: whose model, which follows, is the first centre; None: turns begin with bids.
    """

    key: Key
    voters: PeerCount
    log: tuple[Turn, ...]
    first: int | None = None


class Centre(NamedTuple):
    """The model of a centre that was accepted before the receiver joined."""

    key: Key
    place: Natural
    candidate: int
    model: Tensor


class Bid(NamedTuple):
    """The best bid of a subtree; None: nobody there may stand."""

    key: Key
    turn: Natural
    value: float
    candidate: int | None


class Stand(NamedTuple):
    """Asks the peer that made the best bid to stand."""

    key: Key
    turn: Natural
    candidate: int


class Candidate(NamedTuple):
    """The candidate's model, and its own gain (`rules.election.count`)."""

    key: Key
    turn: Natural
    candidate: int
    gain: float
    model: Tensor


class Votes(NamedTuple):
    """The votes of a subtree on a candidate, summed."""

    key: Key
    turn: Natural
    tally: Tally


class Decision(NamedTuple):
    """What came of a turn; done: it was the last."""

    key: Key
    turn: Natural
    outcome: Turn
    done: bool


# Surveys.


class Question(NamedTuple):
    """The poll of a survey is complete: asks followers of each open cluster to judge it and its partner."""

    key: Key
    followers: tuple[PeerCount, ...]  # by open cluster
    partners: tuple[int, ...] = ()  # by open cluster, -1 for none; one of 0.2 names none, and is refused


class Answer(NamedTuple):
    """What the observers of a subtree say, summed."""

    key: Key
    survey: Survey


class Result(NamedTuple):
    """What a survey decided."""

    key: Key
    entry: Entry


class Alarm(NamedTuple):
    """No model fits `origin` any more (or again one does); number: the newest of an origin counts.

    proof: by which drivers know that it is of `origin`, whoever hands it on.
    """

    origin: int
    number: Natural
    raised: bool
    lineage: Lineage = ()
    proof: bytes | None = None


# The personal last step.


class Curves(NamedTuple):
    """The sender's curve (`rules.personal`), measured before round `due`, and what became of it by averaging.

    cluster: what it deploys, -1 where it has no curve; degree: how many neighbours are alike, -1 before it knows;
    values: rows of the grid's length, the first of them after `first` sweeps. A server sends the mean of a cluster as
    the last.
    """

    due: Natural
    cluster: int
    degree: int
    first: Natural
    values: tuple[float, ...]
    lineage: Lineage = ()


# A server and its clients.


class Served(NamedTuple):
    """The server's models (m, P), with the round that they begin."""

    round: Natural
    bank: Bank


class Report(NamedTuple):
    """What a client trained in a round; None where its training diverged."""

    round: Natural
    message: Message | None


ELECTION = (Probe, Count, Refuse, Open, Centre, Bid, Stand, Candidate, Votes, Decision, Question, Answer, Result)
SERVED = (Served, Report)
KINDS = (Update, Hello, Nothing, CopyRequest, Copy, BankRequest, BankCopy, Declined, Alarm, Curves, *SERVED, *ELECTION)
"""All messages; the other records are parts of them."""
LARGE = (Update, Copy, BankCopy, Centre, Candidate, Served, Report)  # messages that carry models


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

Check = Callable[[Any], bool]


def _are_clusters(slots: tuple[int, ...], call: Call) -> bool:
    return slots == tuple(sorted({j for j in slots if 0 <= j < call.clusters}))


def _are_slots(slots: tuple[int, ...]) -> bool:
    known = 0 < len(slots) <= MOST_SURVEYED
    return known and slots == tuple(sorted({j for j in slots if 0 <= j < MOST_SLOTS}))


def _is_poll(poll: Poll) -> bool:
    """Return whether sums can be those of clients that follow clusters in ascending order."""
    k = len(poll.slots)
    if not _are_slots(poll.slots) or [len(sums) for sums in poll[1:]] != [k, k, k, k, k * k]:
        return False
    counts = zip(poll.unfit, poll.voters, poll.followers, strict=True)
    few = all(min(some) >= 0 and max(some) == some[2] <= MOST_PEERS for some in counts)
    return few and min(poll.samples) >= 0


def _is_survey(survey: Survey) -> bool:
    k = len(survey.slots)
    sizes = [len(sums) for sums in survey[1:]] == [k, EXCESSES * k, k]
    return _are_slots(survey.slots) and sizes and all(0 <= voters <= MOST_PEERS for voters in survey.voters)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


def _is_model(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _is_message(value: Any) -> bool:
    if type(value) not in (Message, PushedMessage):
        return False
    sound: bool | None = value.__dict__.get("sound")  # looked at once, like `Message.finite`: it may go to many
    if sound is None:
        numbers = (value.sender, value.cluster, value.round, value.degree, value.updates)
        sound = value.__dict__["sound"] = (
            all(type(number) is int for number in numbers)
            and min(value.cluster, value.round + 1, value.degree, value.updates) >= 0
            and _is_model(value.model)
            and (value.offer is None or _is_record(Offer, value.offer))
        )
    return sound


_LEAVES: dict[Any, Check] = {
    int: lambda value: type(value) is int,
    bool: lambda value: type(value) is bool,
    bytes: lambda value: type(value) is bytes and len(value) <= MOST_PROOF,
    float: _is_number,
    Tensor: _is_model,
    Message: _is_message,
    Lineage: is_lineage,
    Entry: is_entry,
}
"""What a field of a type may hold; of other types: a tuple or a record of such, or None where that is a choice."""

_RULES: dict[type, Check] = {
    Update: lambda m: m.age_s >= 0,
    Copy: lambda m: m.message.offer is not None,
    BankCopy: lambda m: m.message.offer is not None,
    BankRequest: lambda m: m.clusters is None or len(m.clusters) <= MOST_SLOTS,
    Declined: lambda m: m.cluster is None or m.cluster >= 0,
    Count: lambda m: m.ready <= m.size,
    Key: lambda m: m.attempt <= MOST_ATTEMPT and m.decided <= MOST_TURNS,
    Turn: lambda m: (
        -1 <= m.slot < MOST_SLOTS and m.accepted == (m.slot >= 0) and not (m.accepted and m.candidate is None)
    ),
    Call: lambda m: m.clusters <= MOST_SLOTS and _are_clusters(m.lost, m) and _are_clusters(m.closed, m),
    Poll: _is_poll,
    Question: lambda m: len(m.partners) == len(m.followers),
    Survey: _is_survey,
    Curves: lambda m: (
        -1 <= m.cluster < MOST_SLOTS
        and -1 <= m.degree <= MOST_PEERS
        and len(m.values) % len(GRID) == 0
        and m.first + len(m.values) // len(GRID) <= SWEEPS + 1
        and all(abs(value) <= MOST_LOSS for value in m.values)
    ),
    Tally: lambda m: min(m[:3]) >= 0 and all(len(values) == len(m.totals) for values in m[3:]),
}
"""What must hold besides."""


def _check_of(hint: Any) -> Check:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _LEAVES:
        return _LEAVES[hint]
    if origin is Annotated:
        check: Check = hint.__metadata__[0]
        return check
    if origin is tuple and parts[-1] is not ...:
        checks = [_check_of(part) for part in parts]
        return lambda value: type(value) is tuple and len(value) == len(checks) and all(map(call, checks, value))
    if origin is tuple:
        item = _check_of(parts[0])
        return lambda value: type(value) is tuple and len(value) <= MOST_TURNS and all(map(item, value))
    if parts:
        inner = _check_of(parts[0])
        return lambda value: value is None or inner(value)
    return partial(_is_record, hint)


@cache
def _field_checks(kind: Any) -> list[Check]:
    return [_check_of(hint) for hint in get_type_hints(kind, include_extras=True).values()]


def _is_record(kind: Any, value: Any) -> bool:
    checks = _field_checks(kind)
    return type(value) is kind and all(map(call, checks, value)) and (kind not in _RULES or _RULES[kind](value))


_last_sound: Any = None
"""The last message that was well formed: in one process the same object goes to many receivers in a row."""


def well_formed(message: Any) -> bool:
    """Return whether something that came is a message, with fields of the right types; anything may come."""
    global _last_sound
    if message is _last_sound and message is not None:
        return True
    kind = type(message)
    if kind not in KINDS or not _is_record(kind, message):
        return False
    _last_sound = message
    return True
