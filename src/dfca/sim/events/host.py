"""The peers of a run: everything that goes into one goes through here, and so does everything that comes out.

A `PeerHost` has no clock and no links. The simulator drives it by events (`sim.events.simulation`), a replay by the
trace of an earlier run (`sim.events.replay`): the same inputs in the same order give the same bits.

**Jobs ahead.** The inputs of a job do not change while it runs (`peer.records.work`), so it can be done at any time
before it ends. When the first running job ends, all are done in one call. The other results wait for the ends of their
jobs; they are dropped where a peer leaves or breaks its job off, or a drift changes the samples.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.core.exchange import rules_of
from dfca.peer.curves import CurvePool
from dfca.peer.machine import Machine
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import NO_CLUSTERS, Clusters, layout_of
from dfca.peer.records.messages import LARGE, BankCopy, Copy, Report, Update, scalars
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Draw, Job, Losses, Score, Train, Warm
from dfca.peer.server import Server, ServerClient
from dfca.peer.state import Saved, State
from dfca.sim.events.books import EventResult, Input, RunLog
from dfca.sim.events.links import Parcel, corrupted
from dfca.sim.events.pool import ClientPool, Order
from dfca.sim.events.world import SERVER
from dfca.sim.metrics_table import EvaluationRow, Metrics
from dfca.sim.setting import Setting, receivers_in

_LARGE = frozenset(LARGE)
_AGE = Update._fields.index("age_s")
_LIED_ABOUT = frozenset((Update, Copy, BankCopy, Report))
"""Messages with a model that is the sender's own."""
_new = tuple.__new__
SHORT = frozenset((Score, Draw))
"""Jobs that take no time."""
_FACTS = ("now", "sent", "lives", "saved", "rounds", "refused", "calls")


class Done(NamedTuple):
    """What came of a job of a client, and the call of the engine that did it."""

    client: int
    job: Job
    result: Any
    call: int


class PeerHost:
    """The peers of a run, the server's last."""

    def __init__(self, options: Sequence[PeerOptions], pool: ClientPool, books: RunLog) -> None:
        self.options, self.pool, self.books, self.liars = options, pool, books, pool.liars
        self.metrics = Metrics()
        self.pushes = int(options[0].rules.weights == "push")  # numbers that go with every model
        self.peers: list[Machine | None] = [None] * len(options)
        self.now = 0.0  # the time of what goes in
        self.lives = [0] * len(options)  # how often each has begun
        self.saved: list[Saved | None] = [None] * len(options)  # what absent peers have kept
        self.sent, self.rounds = [0] * len(options), [0] * len(options)  # messages sent; rounds of absent peers
        self.refused, self.calls = 0, 0  # messages that absent peers refused; calls of the engine
        self.short: list[tuple[int, Machine, Job]] = []  # jobs that take no time and are to be done
        self.ahead: dict[int, Done] = {}  # by client, the results of jobs that have yet to end
        self.wakes = [math.inf] * len(options)  # when each peer is to be woken, inf for never
        self.due: set[int] = set()  # peers to be woken now
        self.touched: set[int] = set()  # peers whose time to be woken may have changed
        self._timers: list[tuple[float, int]] = []
        self.noted: deque[tuple[str, int, int, int, float]] | None = None  # the peers' notes, if a replay wants them
        self.send: Callable[[int, tuple[int, ...], Any, int], None]  # (sender, receivers, message, first number)
        self.begun: Callable[[int, Job], None]  # (client, the long job that it begins)

    # Inputs.

    def begin(self, i: int, late: bool) -> None:
        """Make a peer, from what it has kept if there is something, and let it begin."""
        self._make(i)
        peer = self._take(i, "begin", number=int(late))
        self.lives[i] += 1
        self.saved[i] = None
        peer.begin(self.now, late)
        self._drain(i, peer)

    def feed(self, i: int, kind: str, *other: int) -> None:
        """Notify a peer: `connected` or `disconnected` with the neighbour, or `wake`: nothing else is to be handled."""
        peer = self._take(i, kind, *other)
        getattr(peer, kind)(*other, self.now)
        self._drain(i, peer)

    def receive(self, parcel: Parcel, places: Sequence[int], broken: bool) -> None:
        """Hand peers what has arrived; places: which of its receivers it has reached."""
        sender, receivers, message, number, _, _, waited_s, _, _ = parcel
        if waited_s and type(message) is Update:
            message = _new(Update, (*message[:_AGE], message.age_s + waited_s, *message[_AGE + 1 :]))
        peers, now, trace, touch = self.peers, self.now, self.books.trace, self.touched.add
        can_wait = trace is None and self.noted is None
        for place in places:
            i = receivers[place]
            peer = peers[i]
            assert peer is not None
            if trace is not None:
                trace.append(_new(Input, (now, "receive", i, sender, number + place, waited_s, broken)))
            if broken:
                message = message._replace(message=corrupted(message.message, self.options[i].seed, i))
            if peer.receive(sender, message, now) or not can_wait:
                self._drain(i, peer)
            else:
                touch(i)  # what it notes can wait

    def do_jobs(self, clients: Sequence[int], others: Sequence[int] = ()) -> list[Done]:
        """End the long jobs of some clients, in one call; what comes of those of others waits until they end."""
        orders = [order for i in clients if (order := self._order(i)) is not None]
        if self.pool.setting.merging is not None:
            self._note_assignments()  # surveys give clusters other numbers
        missing = [order for order in orders if order.client not in self.ahead]
        early = [order for i in others if (order := self._order(i)) is not None]
        self.ahead |= {done.client: done for done in self._do([*missing, *early], in_place=not early)}
        ended = [self.ahead.pop(order.client) for order in orders]
        assert all(done.job is order.job for done, order in zip(ended, orders, strict=True))
        return ended

    def _order(self, i: int) -> Order | None:
        peer = self.peers[i]
        return None if peer is None or peer.job is None else Order(i, peer.job, peer.bank)

    def drop_ahead(self, clients: Collection[int] | None = None) -> None:
        """Forget what came of jobs before they ended: those of some clients, or of all."""
        for i in sorted(self.ahead if clients is None else self.ahead.keys() & clients):
            done = self.ahead.pop(i)
            if self.books.trace is not None:
                self.books.trace.append(Input(self.now, "unused", i, number=done.call))

    def _note_assignments(self) -> None:
        for i, peer in enumerate(self.peers):
            if peer is not None and peer.assignment is not None:
                self.pool.assigned[i] = peer.assignment

    def do_short_jobs(self) -> list[Done]:
        """Do the jobs that take no time in one call."""
        orders = [Order(i, job, None) for i, peer, job in self.short if self.peers[i] is peer]
        self.short = []
        return self._do(orders)

    def do_background(self, clients: Sequence[int]) -> list[Done]:
        """End what some clients have done beside their rounds, in one call."""
        peers = ((i, self.peers[i]) for i in clients)
        return self._do([Order(i, peer.background, None) for i, peer in peers if peer and peer.background])

    def _do(self, orders: Sequence[Order], in_place: bool = False) -> list[Done]:
        if not orders:
            return []
        self.calls += 1
        results = self.pool.execute(orders, in_place)
        if self.liars is not None and self.liars.lie_about_losses:
            results = [self._claimed(*pair) for pair in zip(orders, results, strict=True)]
        return [
            Done(order.client, order.job, result, self.calls) for order, result in zip(orders, results, strict=True)
        ]

    def _claimed(self, order: Order, result: Any) -> Any:
        """Return what a client that lies about losses claims came of a job."""
        i, peer, liars = order.client, self.peers[order.client], self.liars
        assert liars is not None
        if i not in liars:
            return result
        if isinstance(result, Warm):
            return result._replace(losses=Losses(*map(torch.zeros_like, result.losses)))
        if isinstance(result, Losses) and isinstance(order.job, Score) and isinstance(peer, Peer):
            elections = peer.elections
            mine = elections.own if elections.warm is None else elections.warm.model
            own = [mine is not None and torch.equal(model, mine) for model in order.job.models]
            result = Losses(*(losses.clone() for losses in result))
            for losses in result:
                liars.claim_(losses, own)
        return result

    def finish(self, done: Done) -> None:
        """Hand a peer what came of its job."""
        i, job, result, call = done
        beside = (peer := self.peers[i]) is not None and job is peer.background
        peer = self._take(i, "scored" if type(job) in SHORT else "observed" if beside else "finished", number=call)
        if type(job) is Train:
            assert peer.bank is not None
            self.pool.settle(i, result)
            self.books.multiplications += self.pool.work(i, peer.bank.shape[0])
        peer.finished(job, result, self.now)
        self._drain(i, peer)

    def leave(self, i: int, keeps: bool) -> None:
        """Take a peer away, with everything but what it keeps."""
        peer = self.peers[i]
        assert peer is not None
        self._enter_notes(i, peer.take_notes())
        self.drop_ahead((i,))
        self.peers[i] = None
        self.rounds[i] = peer.round
        self.refused += peer.refused.total()
        self.wakes[i] = math.inf
        self.due.discard(i)
        if keeps and isinstance(peer, Peer) and (peer.bank is not None or peer.elections.own is not None):
            self.saved[i] = peer.save()
        else:
            self.pool.empty(i)

    def _take(self, i: int, kind: str, other: int = -2, number: int = -1) -> Machine:
        if self.books.trace is not None:
            self.books.trace.append(Input(self.now, kind, i, other, number))
        peer = self.peers[i]
        assert peer is not None
        return peer

    def _make(self, i: int) -> Machine:
        peer = make_machine(self.options[i], partial(self.pool.allocate, i), self.lives[i], self.saved[i])
        self.peers[i] = peer
        return peer

    # Outputs.

    def _drain(self, i: int, peer: Machine) -> None:
        """Carry out what a peer asks for."""
        out = peer.ready()
        if i in self.ahead and self.ahead[i].job is not peer.job:
            self.drop_ahead((i,))  # it broke the job off
        if out.noted:
            self._enter_notes(i, out.noted)
        if out.messages:
            self._send(i, out.messages)
        for job in out.work:
            if type(job) in SHORT:
                self.short.append((i, peer, job))
            else:
                self.begun(i, job)
        self.touched.add(i)  # when it is to be woken may have changed

    def _send(self, i: int, messages: Sequence[tuple[int, Any]]) -> None:
        """Hand messages over; those in a row that are the same object go as one, to several neighbours."""
        begin, total = 0, len(messages)
        while begin < total:
            message = messages[begin][1]
            end = begin + 1
            while end < total and messages[end][1] is message:
                end += 1
            if self.liars is not None and type(message) in _LIED_ABOUT and i in self.liars:
                message = self._told(i, message)
            if type(message) is Update:
                beside = 2 * len(message.offers) + len(message.freshness) + self.pushes
                self.books.scalars += (end - begin) * beside
            elif type(message) not in _LARGE:
                self.books.scalars += (end - begin) * scalars(message)
            self.send(i, tuple([receiver for receiver, _ in messages[begin:end]]), message, self.sent[i] + 1)
            self.sent[i] += end - begin
            begin = end

    def _told(self, i: int, message: Any) -> Any:
        """Return what a liar sends in place of a message with a model of its own."""
        true, liars = message.message, self.liars
        if true is None:
            return message
        assert liars is not None
        if true.offer is None and true.cluster == self.pool.assigned[i]:
            liars.note_first(i, true.model)
        now = true.round - (true.offer is not None)  # a copy is as of the round that its sender has ended
        return message._replace(message=replace(true, model=liars.tell(i, true.cluster, now, true.model)))

    def _enter_notes(self, i: int, notes: Sequence[tuple[str, int, int, int, float]]) -> None:
        if notes:
            self.books.enter(self.now, i, notes)
            if self.noted is not None:
                self.noted += notes

    def enter_notes(self) -> None:
        """Enter what the peers have noted and kept for themselves since."""
        for i, peer in enumerate(self.peers):
            if peer is not None:
                self._enter_notes(SERVER if i == self.books.clients else i, peer.take_notes())

    def _plan_wakes(self) -> None:
        """Ask the peers into which something went when they are to be woken: once, however much it was."""
        touched, self.touched, now = self.touched, set(), self.now
        for i in touched:
            peer = self.peers[i]
            if peer is None:
                continue
            wake = peer.next_wake()
            if wake is None:
                self.wakes[i] = math.inf
            elif wake <= now:
                self.wakes[i] = wake
                self.due.add(i)
            elif wake != self.wakes[i]:
                self.wakes[i] = wake
                heapq.heappush(self._timers, (wake, i))

    def next_timer(self) -> float:
        """Return when the next peer is to be woken; inf for never."""
        if self.touched:
            self._plan_wakes()
        timers = self._timers
        while timers and self.wakes[timers[0][1]] != timers[0][0]:
            heapq.heappop(timers)  # planned before the peer changed its time
        return timers[0][0] if timers else math.inf

    def take_due(self) -> list[int]:
        """Take out the peers that are to be woken now, in ascending order."""
        if self.touched:
            self._plan_wakes()
        now, timers = self.now, self._timers
        while timers and timers[0][0] <= now:
            self.due.add(heapq.heappop(timers)[1])
        if not self.due:
            return []
        due, self.due = self.due, set()
        return sorted([i for i in due if self.wakes[i] <= now])

    # The whole.

    def evaluate(self, final: bool = False) -> EvaluationRow:
        """Score everybody, and add the row to the metrics; final: with the personal last steps."""
        self.enter_notes()
        self.books.note(self.now, "evaluate", SERVER, number=1 if final else -1)
        scores = self.pool.evaluate(self.books, self.held(), self.personal_steps() if final else None)
        row = EvaluationRow.of(scores)
        self.metrics.append(row)
        return row

    def drift(self, i: int) -> None:
        """Switch all clients to their later samples: a client begins the round of the drift."""
        self.books.note(self.now, "drift", i)
        self.drop_ahead()
        self.pool.drift()

    def held(self) -> list[Clusters]:
        """Return which models each client holds, those that are away included."""
        held = []
        for holder in self._holders():
            if holder is None or holder.bank is None:
                held.append(NO_CLUSTERS)
            else:
                closed = holder.copies.closed if isinstance(holder, Machine) else layout_of(holder.lineage).closed
                held.append(Clusters(len(holder.bank), closed))
        return held

    def _holders(self) -> list[Machine | Saved | None]:
        """List the clients, or what those that are away have kept."""
        return [self.peers[i] or self.saved[i] for i in range(self.books.clients)]

    def personal_steps(self) -> list[int]:
        """Return the personal last steps of each client, as far as they know; those that are away included."""
        fixed = self.pool.setting.last_steps
        if fixed != "auto":
            return [fixed] * self.books.clients
        return [_curves_of(holder).steps for holder in self._holders()]

    def clusters(self) -> tuple[int, int | None]:
        """Return the most models that somebody holds, and None.

        Where clusters are merged: how many were opened, and how many are left, 0 before the last survey.
        """
        holders = [peer for peer in self.peers if isinstance(peer, Peer) and peer.lineage]
        if holders and holders[0].options.method.merging is not None:
            first = holders[0]
            return len(first.lineage[0].slots), len(first.open_clusters) if first.lineage[-1].last else 0
        server, held = self.peers[SERVER], [clusters.models for clusters in self.held()]
        return max(1, *held, 0 if server is None or server.bank is None else len(server.bank)), None

    def is_done(self, i: int) -> bool:
        """Return whether a participant that is there has done all its rounds."""
        peer = self.peers[i]
        return peer is not None and peer.state is State.DONE

    def waits(self) -> list[str]:
        """Describe who waits for whom."""
        order = [SERVER, *range(self.books.clients)] if len(self.peers) > self.books.clients else range(len(self.peers))
        return [
            f"{'the server' if i == SERVER else f'client {i}'} {peer.waits()}"
            for i in order
            if (peer := self.peers[i]) is not None and not self.is_done(i)
        ]

    def result(self) -> EventResult:
        """Sum up what happened so far."""
        self.enter_notes()
        books, pool, clients = self.books, self.pool, self.books.clients
        present = [peer for peer in self.peers if peer is not None]
        return EventResult(
            metrics=self.metrics,
            banks=pool.fill(self.held()),
            assignments=torch.tensor(pool.assigned),
            rounds=[self.rounds[i] if (peer := self.peers[i]) is None else peer.round for i in range(clients)],
            time_s=books.time,
            idle_shares=books.idle_shares(),
            compute_s=books.busy_s(),
            staleness=dict(sorted(books.ages.items())),
            records=dict(books.kinds),
            rejected=self.refused + sum(peer.refused.total() for peer in present),
            trace=books.trace,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs; between two instants."""
        facts = {name: getattr(self, name) for name in _FACTS}
        peers = [None if peer is None else peer.state_of() for peer in self.peers]
        ahead = {i: (done.call, done.result) for i, done in self.ahead.items()}
        return {**facts, "peers": peers, "metrics": [row.stored for row in self.metrics], "ahead": ahead}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the pool holds the banks already."""
        for name in _FACTS:
            setattr(self, name, state[name])
        self.metrics[:] = map(EvaluationRow.of, state["metrics"])
        self._timers, self.due, self.touched = [], set(), set()
        for i, fields in enumerate(state["peers"]):
            i = SERVER if i == self.books.clients else i
            self.peers[i] = None
            if fields is not None:
                peer = self._make(i)
                peer.restore(fields)
                if isinstance(peer, Peer) and peer.lineage:
                    self.pool.setting.check_opened(len(peer.lineage[0].slots))
                self._drain(i, peer)
        self.ahead = {
            i: Done(i, peer.job, result, call)
            for i, (call, result) in state.get("ahead", {}).items()
            if (peer := self.peers[i]) is not None and peer.job is not None
        }


def make_machine(
    options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0, saved: Saved | None = None
) -> Machine:
    """Make a participant of the kind that the options ask for, which has yet to begin."""
    if options.rules.exchange != "server":
        return Peer(options, allocate, incarnation, saved)
    return (Server if options.id == SERVER else ServerClient)(options, allocate, incarnation)


def peer_options(
    setting: Setting, pool: ClientPool, near: Sequence[Sequence[int]], rounds: int, **changes: Any
) -> list[PeerOptions]:
    """Make what does not change about the peers of a setting, the server's last; changes: of the method."""
    algorithm, clients = setting.algorithm, setting.clients
    ids = [*range(clients), *([SERVER] if len(near) > clients else [])]
    method, layout = setting.method.changed(**changes), pool.start.layout
    if pool.dry:
        method = method.changed(revives=False, merging=None)
    if pool.dry or not pool.rounds:
        method = method.changed(personal=0)
    return [
        PeerOptions(
            rules=rules_of(
                i, 0 if i == SERVER else setting.graph.degree(i), algorithm, method, layout, to, setting.seed
            ),
            neighbours=tuple(near[i]),
            size=pool.size,
            dtype=setting.dtype,
            start="shared" if pool.dry and algorithm.start == "elected" else algorithm.start,
            seed=setting.seed,
            clusters=setting.clusters if pool.elects else pool.models,
            rounds=rounds,
            method=method,
        )
        for i, to in ((i, () if i == SERVER else receivers_in(setting, i)) for i in ids)
    ]


def _curves_of(holder: Machine | Saved | None) -> CurvePool:
    """Return the curves that a client knows, or has kept; a server has none."""
    if isinstance(holder, Peer | ServerClient):
        return holder.last_step.curves
    return holder.curves if isinstance(holder, Saved) else CurvePool()
