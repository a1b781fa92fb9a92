"""Carry a world out: a clock, links and crashes around real peers, and what must hold at every moment."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dfca.core.method import LocalOptions, MergeOptions, Method
from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.personal import SWEEPS
from dfca.core.state import is_finite
from dfca.faults.bad_input import corrupt, garble, lie
from dfca.faults.tiny import SIZE, CheckedRules, TinyWork, Violation
from dfca.faults.world import FAULTS_S, Crash, FaultWorld
from dfca.peer.machine import Machine, Memory
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.messages import LARGE, BankCopy, Copy, Update, well_formed
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import LONG, Job, Rest, Train
from dfca.peer.state import Saved, State
from dfca.sim.events.host import make_machine
from dfca.sim.events.world import SERVER

CALM_S = 6000.0
"""So long after that everything must be well."""
MORE_ROUNDS = 2
"""So many rounds every peer must do after the faults."""
ROUNDS = 10**9
"""Nobody reaches the last round, but who is lied to."""
MAX_EVENTS = 400_000
"""A world that is not over after so many events hangs."""


class Event(NamedTuple):
    """What waits in the queue."""

    time: float
    rank: int
    number: int
    kind: str
    peer: int
    detail: Any


@dataclass
class FaultLink:
    """A pair of neighbours: its epoch, whether it is up, and when the last small message each way arrives."""

    epoch: int = 0
    up: bool = False
    last: dict[int, float] = field(default_factory=dict)


class FaultRun:
    """Carries a world out and checks it. `log_of`: the peer whose inputs are kept for a replay."""

    def __init__(self, world: FaultWorld, log_of: int | None = None) -> None:
        self.world, self.rnd = world, random.Random(f"run/{world.number}")
        self.server, self.rounds = world.algorithm == "ifca", world.rounds or ROUNDS
        self.graph = nx.Graph()
        self.graph.add_nodes_from(range(world.peers))
        self.graph.add_edges_from([(SERVER, i) for i in range(world.peers)] if self.server else world.edges)
        if world.algorithm == "local":
            self.graph.remove_edges_from(list(self.graph.edges))
        self.ids = sorted(self.graph)
        self.now, self.count, self.handled = 0.0, 0, 0
        self.queue: list[Event] = []
        self.peers: dict[int, Machine] = {}
        self.lives: dict[int, int] = dict.fromkeys(self.ids, -1)
        self.saves: dict[int, list[Saved]] = {i: [] for i in self.ids}
        self.wakes: dict[int, float] = {}
        self.memory: dict[int, Callable[[int], Tensor]] = {}
        self.links = {frozenset(edge): FaultLink() for edge in self.graph.edges}
        self.known: dict[tuple[int, int], int] = {}
        self.away: set[int] = set()
        self.made: dict[int, tuple[Lineage, Tensor]] = {}
        self.offsets: dict[int, float] = dict.fromkeys(self.ids, 0.0)
        self.pending: dict[int, Crash] = {}
        slow = dict(world.slow)
        self.round_s = {i: slow.get(i, 1.0) for i in self.ids}
        self.work = {i: TinyWork(world.number, i, i % world.groups, self._start, self._models) for i in self.ids}
        self.rounds_at_stop: dict[int, int] = {}
        self.inputs: list[tuple[Any, ...]] = []
        self.jobs: list[Job] = []
        self.log_of = log_of
        self.stopped = False

    @property
    def _start(self) -> str:
        return {"dfca-auto": "elected", "dfca-fi": "elected", "dfca-li": "own"}.get(self.world.algorithm, "shared")

    @property
    def _models(self) -> int:
        return 1 if self.world.algorithm in ("dfedavgm", "local") else self.world.clusters or 2

    def options(self, i: int) -> PeerOptions:
        """Make the options of a peer."""
        world = self.world
        exchange = {"local": "none", "ifca": "server"}.get(world.algorithm, "gossip")
        share = "relay" if world.algorithm == "dfca-auto" else "trained" if exchange != "gossip" else world.share
        degree = self.graph.degree(i)
        rules = CheckedRules(
            i,
            degree,
            exchange,  # type: ignore[arg-type]
            world.weights,  # type: ignore[arg-type]
            share,  # type: ignore[arg-type]
            peer=lambda: self.peers[i],
            made=self.made,
        )
        elected = self._start == "elected"
        return PeerOptions(
            rules,
            tuple(sorted(self.graph.neighbors(i))),
            SIZE,
            self._start,  # type: ignore[arg-type]
            self.rounds,
            world.number,
            world.clusters if elected else self._models,
            torch.float64,
            Method(
                aggregation=world.aggregation,  # type: ignore[arg-type]
                timeout_s=4.0,
                local=LocalOptions(steps=1),
                participation=world.participation,
                election=ElectionOptions(warmup_steps=2, patience=2, most=5),
                revives=world.algorithm == "dfca-auto",
                merging=MergeOptions(opens=4, first=3, every=2, steps=1) if world.merges else None,
                personal="auto" if world.rounds else 0,
            ),
            join_s=5.0,
            hang_s=5.0,
        )

    # The clock.

    def push(self, time: float, rank: int, kind: str, peer: int, detail: Any = None) -> None:
        """Plan an event."""
        self.count += 1
        heapq.heappush(self.queue, Event(time, rank, self.count, kind, peer, detail))

    def run(self) -> None:
        """Carry the world out. Raises Violation."""
        self._plan()
        end_s = FAULTS_S + CALM_S
        while True:
            while self.queue and self.queue[0].time <= self.now:
                self._handle(heapq.heappop(self.queue))
            due = [i for i in sorted(self.peers) if self._due(i) <= self.now]
            if due:
                self._count(len(due))
                for i in due:
                    if i in self.peers:
                        self._call(i, "wake")
                continue
            if self.stopped and self._is_well():
                return
            soonest = min((self._due(i) for i in self.peers), default=math.inf)
            if self.queue:
                soonest = min(soonest, self.queue[0].time)
            if soonest > end_s:
                raise Violation(f"not well at the end: {self._unwell()}")
            self.now = max(self.now, soonest)

    def _due(self, i: int) -> float:
        return self.wakes[i] - self.offsets[i]

    def _plan(self) -> None:
        world = self.world
        late = dict(world.late)
        for i in self.ids:
            if i in late:
                self.away.add(i)
                self.push(late[i], 0, "return", i, True)
            else:
                self._born(i, None, late=False)
        for link in self.links:
            self._update_link(link)
        for crash in world.crashes:
            self.push(crash.at_s, 0, "crash", crash.peer, crash)
        for cut in world.cuts:
            self.push(cut.begin_s, 0, "cut", 0)
            self.push(cut.end_s, 0, "cut", 0)
        for peer, at_s, jump in world.jumps:
            self.push(at_s, 0, "jump", peer, jump)
        for _ in range(world.flaps):
            if self.links:
                self.push(self.rnd.uniform(0, FAULTS_S), 0, "flap", 0, self.rnd.randrange(len(self.links)))
        for _ in range(world.rewires):
            self.push(self.rnd.uniform(0, FAULTS_S), 0, "rewire", 0)
        if world.drift_s:
            self.push(world.drift_s, 0, "drift", 0)
        if world.swap >= 0:
            self.push(self.rnd.uniform(0, FAULTS_S), 3, "swap", self.ids[world.swap % len(self.ids)])
        self.push(FAULTS_S, 0, "stop", 0)

    def _count(self, events: int) -> None:
        self.handled += events
        if self.handled > MAX_EVENTS:
            raise Violation(f"hangs at {self.now:g} s: {self._unwell()}")

    def _handle(self, event: Event) -> None:
        self._count(1)
        _, _, _, kind, i, detail = event
        if kind == "deliver":
            self._deliver(i, *detail)
        elif kind == "done":
            peer, (life, job) = self.peers.get(i), detail
            if peer is None or life != self.lives[i]:
                return
            if isinstance(job, LONG) and getattr(peer, "job", None) is not job:
                return
            self._call(i, "finished", job, self.work[i].run(job, peer.bank))
        elif kind == "link":
            self._notice(i, *detail)
        elif kind == "crash":
            if self.stopped or i in self.away:
                return
            if detail.when == "any" or i == SERVER:
                self._crash(i, detail)
            else:
                self.pending[i] = detail
        elif kind == "return":
            self._return(i, detail)
        elif kind == "cut":
            for link in self.links:
                self._update_link(link)
        elif kind == "jump":
            self.offsets[i] += detail
        elif kind == "flap":
            self._break(list(self.links)[detail])
        elif kind == "rewire":
            self._rewire()
        elif kind == "rewired":
            self._take_neighbours(i)
        elif kind == "drift":
            for peer in self.ids:
                self.work[peer].move_to((peer % self.world.groups) + 10 * (peer % 2))
        elif kind == "swap":
            self._swap(i)
        elif kind == "stop":
            self._stop()

    # Peers.

    def _born(self, i: int, saved: Saved | None, late: bool) -> None:
        self.lives[i] += 1
        self.memory[i] = Memory(SIZE, torch.float64)
        self.peers[i] = peer = make_machine(self.options(i), self.memory[i], self.lives[i], saved)
        self.away.discard(i)
        if i == self.log_of:
            self.inputs, self.jobs = [("born", peer.options, self.lives[i], saved)], []
        self._call(i, "begin", late and saved is None)

    def _call(self, i: int, what: str, *arguments: Any) -> None:
        """Call an input of a peer, and carry out what it wants."""
        peer, now = self.peers[i], self.now + self.offsets[i]
        if what == "wake":  # its own clock, without the rounding of ours
            due = peer.next_wake()
            now = now if due is None else max(now, due)
        if i == self.log_of:
            logged = arguments
            if what == "finished":  # jobs are known by their place in the order in which they were asked for
                logged = (next(n for n, job in enumerate(self.jobs) if job is arguments[0]), arguments[1])
            self.inputs.append((what, logged, now))
        try:
            if what == "begin":
                peer.begin(now, *arguments)
            else:
                getattr(peer, what)(*arguments, now)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__} out of peer {i} at {what}: {error}") from error
        wake = peer.next_wake()
        self.wakes[i] = math.inf if wake is None else wake
        ready = peer.ready()
        if i == self.log_of:
            self.jobs += ready.work
        crash = self.pending.get(i)
        if ready.save and isinstance(peer, Peer):
            if crash is not None and crash.when == "before save":
                del self.pending[i]
                self._crash(i, crash)
                return
            self.saves[i] = [*self.saves[i][-3:], peer.save()]
            if crash is not None:
                del self.pending[i]
                self._crash(i, crash)
                return
        if what != "receive":  # what a message brings is folded in `wake`
            self._check(peer)
        for to, message in ready.messages:
            self._send(i, to, message)
        for job in ready.work:
            takes = self.round_s[i] if isinstance(job, Train | Rest) else 2.0 if isinstance(job, LONG) else 0.0
            self.push(self.now + takes, 1, "done", i, (self.lives[i], job))

    def _crash(self, i: int, crash: Crash) -> None:
        del self.peers[i]
        self.away.add(i)
        self.lives[i] += 1
        for link in self.links:
            if i in link:
                self._update_link(link)
        kept = self.saves[i]
        saved = None
        if crash.keeps == "save" and kept:
            saved = kept[-1]
        elif crash.keeps == "old" and kept:
            saved = kept[0]
        self.push(min(FAULTS_S, self.now + crash.away_s), 0, "return", i, saved or True)

    def _return(self, i: int, what: Any) -> None:
        if i in self.peers:
            return
        self._born(i, what if isinstance(what, Saved) else None, late=True)
        for link in self.links:
            if i in link:
                self._update_link(link)

    def _swap(self, i: int) -> None:
        """Put a copy of a peer's state in its place: nothing may change."""
        peer = self.peers.get(i)
        if not isinstance(peer, Peer) or i == self.log_of:
            return
        twin = Peer(peer.options, self.memory[i], peer.incarnation)
        twin.restore(peer.state_of())
        self.peers[i], wake = twin, twin.next_wake()
        self.wakes[i] = math.inf if wake is None else wake

    def _stop(self) -> None:
        """End all faults."""
        self.stopped = True
        self.pending.clear()
        self.world = replace(self.world, loss=0.0, duplication=0.0, corruption=0.0, garbage=(), liars=())
        for i in self.ids:
            if i not in self.peers:
                self.push(self.now, 0, "return", i, self.saves[i][-1] if self.saves[i] else True)
        for link in self.links:
            self._update_link(link)
        self.rounds_at_stop = {i: self.peers[i].round if i in self.peers else 0 for i in self.ids}

    # The network.

    def _rewire(self) -> None:
        """Take an edge out of the graph or add one; its ends learn of it one after the other."""
        if self.stopped or self.world.algorithm in ("local", "ifca") or self.world.peers < 3:
            return
        i, j = self.rnd.sample(range(self.world.peers), 2)
        if self.graph.has_edge(i, j):
            self.graph.remove_edge(i, j)
        else:
            self.graph.add_edge(i, j)
            self.links.setdefault(frozenset((i, j)), FaultLink())
        for end in (i, j):
            self.push(self.now + self.rnd.uniform(0, 1.0), 0, "rewired", end)

    def _take_neighbours(self, i: int) -> None:
        if i in self.peers:
            self._call(i, "rewire", tuple(self.graph.neighbors(i)))
        for link in self.links:
            if i in link:
                self._update_link(link)

    def _wanted_up(self, link: frozenset[int]) -> bool:
        if any(i not in self.peers for i in link) or not self._is_edge(*link):
            return False
        if self.stopped:
            return True
        return not any(
            cut.begin_s <= self.now < cut.end_s and len(link & set(cut.side)) == 1 for cut in self.world.cuts
        )

    def _is_edge(self, one: int, other: int) -> bool:
        """Return whether both ends know that they are neighbours."""
        ends = ((self.peers[one], other), (self.peers[other], one))
        return all(not isinstance(peer, Peer) or end in peer.neighbours for peer, end in ends)

    def _update_link(self, link: frozenset[int]) -> None:
        state, up = self.links[link], self._wanted_up(link)
        if up == state.up:
            return
        state.up = up
        state.epoch += 1
        state.last.clear()
        for i in link:
            (other,) = link - {i}
            later = self.rnd.uniform(0, 2.0) if not up else 0.0
            self.push(self.now + later, 0, "link", i, (other, state.epoch, up))

    def _break(self, link: frozenset[int]) -> None:
        """Break a link for a moment: what is on its way is lost."""
        state = self.links[link]
        if not state.up or self.stopped:
            return
        state.up = False
        state.epoch += 1
        self.push(self.now + 0.2, 0, "cut", 0)
        for i in link:
            (other,) = link - {i}
            self.push(self.now + self.rnd.uniform(0, 0.4), 0, "link", i, (other, state.epoch, False))

    def _notice(self, i: int, other: int, epoch: int, up: bool) -> None:
        """Let an end of a link notice that it went down or up."""
        link = frozenset((i, other))
        if i not in self.peers:
            return
        linked = other in self.peers[i].links
        newer = self.known.get((i, other), -1) < epoch
        if not up:
            if linked and newer:
                self._call(i, "disconnected", other)
        elif self.links[link].up and self.links[link].epoch == epoch:
            if linked:
                self._call(i, "disconnected", other)
            if i in self.peers:
                self.known[i, other] = epoch
                self._call(i, "connected", other)

    def _send(self, i: int, to: int, message: Any) -> None:
        link = self.links.get(frozenset((i, to)))
        if link is None:
            raise Violation(f"peer {i} sends to {to}, which is no neighbour")
        self._remember(i, message)
        world, rnd = self.world, self.rnd
        if i in world.garbage and rnd.random() < 0.3:
            message = garble(message, rnd)
        if i in world.liars and rnd.random() < 0.5 and well_formed(message):  # who sends garbage may lie as well
            message = lie(message, rnd)
        if not link.up or self.known.get((i, to)) != link.epoch:
            return
        delay = world.delay_s * (min(8.0, math.exp(world.spread * rnd.gauss(0, 1))) if world.spread else 1.0)
        if isinstance(message, LARGE):
            delay *= rnd.choice((1.0, 1.0, 3.0)) if world.spread else 1.0
            if isinstance(message, Update):
                if rnd.random() < world.loss:
                    return
                if rnd.random() < world.duplication:
                    self.push(self.now + delay * rnd.uniform(0.5, 3), 2, "deliver", to, (i, link.epoch, message))
                if rnd.random() < world.corruption and well_formed(message):
                    message = corrupt(message, rnd)
            elif rnd.random() < world.loss:
                delay += 2 * world.delay_s + 0.1
            at = self.now + delay
        else:
            if rnd.random() < world.loss:
                delay += 2 * world.delay_s + 0.1
            at = max(self.now + delay, link.last.get(to, 0.0))
            link.last[to] = at
        self.push(at, 2, "deliver", to, (i, link.epoch, message))

    def _remember(self, i: int, message: Any) -> None:
        """Keep of which lineage a model was when it was sent."""
        if isinstance(message, Update | Copy | BankCopy):
            model = message.message.model
            self.made[id(model)] = (message.lineage, model)

    def _deliver(self, i: int, sender: int, epoch: int, message: Any) -> None:
        link = self.links[frozenset((i, sender))]
        if i in self.peers and link.up and link.epoch == epoch and self.known.get((i, sender)) == epoch:
            self._call(i, "receive", sender, message)

    # What must hold.

    def _check(self, peer: Machine) -> None:
        """Check what must hold at every moment."""
        if peer.bank is not None and not is_finite(peer.bank):
            raise Violation(f"peer {peer.id} has a model that is not finite")
        if not isinstance(peer, Peer):
            return
        degree, models = len(peer.neighbours), 0 if peer.bank is None else len(peer.bank)
        waiting = sum(map(len, peer.cycle.inbox.kept.values()))
        senders = self.world.peers if self.world.rewires else degree  # what former neighbours sent counts
        desk, suspects = peer.desk, peer.joiner.suspects
        if waiting > 2 * senders * max(1, models) or len(desk.wanted) > max(1, models) or len(peer.links) > degree:
            raise Violation(f"peer {peer.id} keeps {waiting} updates and {len(desk.wanted)} requests")
        if len(suspects) > degree or len(desk.answers) > max(1, models):
            raise Violation(f"peer {peer.id} keeps {len(suspects)} suspects, {len(desk.answers)} answers")
        curves = peer.last_step.curves
        if len(curves.heard) > degree or any(len(heard.rows) > SWEEPS + 1 for heard in curves.heard.values()):
            raise Violation(f"peer {peer.id} keeps the curves of {len(curves.heard)} neighbours")
        if curves.samples and not all(math.isfinite(value) for row in curves.rows for value in row):
            raise Violation(f"peer {peer.id} has a curve that is not finite")

    def _parts(self) -> Iterator[set[int]]:
        yield from nx.connected_components(self.graph)

    def _problems(self) -> Iterator[str]:
        for i in self.ids:
            peer = self.peers.get(i)
            if peer is None or peer.bank is None:
                yield f"peer {i} has no models ({'away' if peer is None else peer.waits()})"
            elif peer.round < min(self.rounds, self.rounds_at_stop.get(i, 0) + MORE_ROUNDS):
                yield f"peer {i} is in round {peer.round} ({peer.state.name.lower()}, {peer.waits()})"
            elif peer.round >= self.rounds:
                yield from self._unpicked(i, peer)
        for part in self._parts():
            found = [self.peers[i] for i in sorted(part) if isinstance(self.peers.get(i), Peer)]
            lineages = {peer.lineage for peer in found if isinstance(peer, Peer)}
            sizes = {len(peer.bank) for peer in found if peer.bank is not None}
            if len(lineages) > 1 or len(sizes) > 1:
                yield f"{len(lineages)} lineages and {len(sizes)} sizes among {sorted(part)}"

    def _unpicked(self, i: int, peer: Machine) -> Iterator[str]:
        """Say what is missing at a peer that has ended: it has picked its steps, and its sweeps go on to their end."""
        if peer.state is not State.DONE:
            yield f"peer {i} is {peer.state.name.lower()} after its last round"
        elif isinstance(peer, Peer):
            curves = peer.last_step.curves
            sweeps = len(curves.rows) - 1
            if sweeps < SWEEPS and curves.alike(peer.links):
                yield f"peer {i} has done {sweeps} sweeps"

    def _is_well(self) -> bool:
        return next(self._problems(), None) is None

    def _unwell(self) -> str:
        return "; ".join(list(self._problems())[:4])
