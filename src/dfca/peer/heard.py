"""What each message does to a peer. Handlers call its parts and steps; what it does and holds they do not write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dfca.peer.inbox import UNKNOWN, Neighbour
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.work import WarmUp
from dfca.peer.state import State

if TYPE_CHECKING:
    from dfca.peer.peer import Peer


def _hello(peer: Peer, sender: int, hello: m.Hello) -> None:
    known = peer.links[sender]
    if known.hello is not None and known.hello.incarnation not in (UNKNOWN, hello.incarnation):
        peer.links[sender] = known = Neighbour()
    if known.hello is None or known.hello.incarnation == UNKNOWN:
        peer.cycle.inbox.forget_sender(sender)  # it may have begun a new life, with an older round
    known.greet(hello)
    _take_in_hello(peer)


def _take_in_hello(peer: Peer) -> None:
    """Continue where it was the neighbours' hello that was waited for."""
    peer.seek()
    peer.settle()
    peer.check_wait()
    peer.begin_if_all_have_spoken()


def _update(peer: Peer, sender: int, update: m.Update) -> None:
    message, parts, lineage, _, freshness, offers = update
    round, cycle = message.round, peer.cycle
    if message.sender != sender:
        peer.out.refuse("in another's name", sender)
    elif round > m.MOST_ROUND:
        peer.out.refuse("malformed", sender)
    else:
        _learn(peer, sender, round, lineage, freshness, offers).ended(round, message.cluster, parts)
        cycle.hold(peer, sender, update)
        if cycle.step is None and cycle.ending is not None:  # also asked there, but there are many updates
            peer.check_wait()


def _nothing(peer: Peer, sender: int, message: m.Nothing) -> None:
    peer.out.note("nothing", sender, round=message.round)
    _learn(peer, sender, *message).ended(message.round, -1, 1)
    peer.check_wait()


def _learn(
    peer: Peer, sender: int, round: int, lineage: Lineage, freshness: tuple[int, ...], offers: m.Offers
) -> Neighbour:
    """Take in what comes along with the end of a neighbour's round; returns what is known of it."""
    known = peer.links[sender]
    if round >= known.offers_round:
        if offers:
            held = len(peer.copies.counts)
            offers = tuple({j: (j, offer) for j, offer in offers if offer.sender == sender and j < held}.values())
        known.offers, known.offers_round, known.offers_lineage = offers, round, lineage
    if freshness:
        peer.elections.learn(peer, freshness, lineage)
    hello = known.hello
    if hello is not None and hello.clusters and hello.lineage == lineage:
        return known  # as almost always
    if known.learn_from_model(round, lineage):
        if hello is None:
            _take_in_hello(peer)
        else:
            peer.seek()
    return known


def _copy(peer: Peer, sender: int, copy: m.Copy) -> None:
    if peer.desk.take_in(peer, sender, copy):
        if peer.bank is not None:
            peer.cycle.fold_if_idle(peer)
        peer.check_wait()


def _declined(peer: Peer, sender: int, declined: m.Declined) -> None:
    if declined.cluster is not None:
        if peer.desk.is_declined(sender, declined.cluster):
            peer.check_wait()
    elif peer.joiner.expects(sender):
        peer.links[sender].decline()
        peer.carry_out(peer.joiner.give_up(peer))
        peer.settle()


def _bank_copy(peer: Peer, sender: int, copy: m.BankCopy) -> None:
    if peer.joiner.expects(sender):
        peer.carry_out(peer.joiner.take_in(peer, sender, copy))
        peer.settle()
    else:
        peer.desk.refuse_unasked(peer, sender, copy)


def _probe(peer: Peer, sender: int, probe: m.Probe) -> None:
    surveys = probe.call is not None and probe.call.survey
    if peer.changes:
        fits = False
    elif surveys:
        fits = peer.state is not State.DONE and peer.surveys.may_join(peer, probe)
    else:
        fits = peer.elections.may_join(peer, sender, probe, pursuing=peer.joiner.pursuit is not None)
    if fits and not surveys and peer.surveys.wave is not None:
        peer.leave_wave()  # it can wait: others need an election first
    wave = peer.wave
    if wave is not None and wave.is_kind_of(probe):
        wave.receive(sender, probe, peer.now)
    elif wave is not None or not fits:
        peer.out.send(sender, m.Refuse(probe.key))
        peer.out.send(sender, peer.hello())
    elif surveys:
        peer.surveys.join(peer, sender, probe, peer.elections.detector.unfit, ending=peer.cycle.ending is not None)
    else:
        _join_election(peer, sender, probe)


def _join_election(peer: Peer, sender: int, probe: m.Probe) -> None:
    """Join an election; with the models at the end of the round where one is ending."""
    starts = peer.bank is None
    peer.elections.join(peer, sender, probe, starts or peer.job is not None or bool(peer.cycle.finishes))
    if starts and peer.job is None and peer.elections.warm is None:
        peer.warm_up()
    elif not starts:
        peer.stop_beside(WarmUp)  # it was looking at its fit: the election decides that
        if peer.cycle.ending is None:
            peer.elections.prepare(peer)


def _election(peer: Peer, sender: int, message: Any) -> None:
    if peer.wave is not None:
        peer.wave.receive(sender, message, peer.now)
    elif not isinstance(message, m.Refuse):
        peer.out.send(sender, m.Refuse(message.key))


HANDLERS: dict[type, Callable[[Peer, int, Any], None]] = {
    **dict.fromkeys(m.ELECTION, _election),
    m.Probe: _probe,
    m.Hello: _hello,
    m.Update: _update,
    m.Nothing: _nothing,
    m.CopyRequest: lambda peer, sender, message: peer.desk.answer(peer, sender, message),
    m.Copy: _copy,
    m.Declined: _declined,
    m.BankRequest: lambda peer, sender, message: peer.joiner.answer(peer, sender, message),
    m.BankCopy: _bank_copy,
    m.Alarm: lambda peer, sender, message: peer.elections.hear_alarm(peer, sender, message),
    m.Curves: lambda peer, sender, message: peer.last_step.hear(peer, sender, message),
}
"""By kind of message."""
