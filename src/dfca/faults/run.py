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
from dfca.core.rules.staleness import Staleness
from dfca.core.rules.surveys import merging_of
from dfca.core.state import is_finite
from dfca.faults.bad_input import corrupt, garble, lie
from dfca.faults.tiny import SIZE, CheckedRules, TinyWork, Violation
from dfca.faults.world import ELECTED, FAULTS_S, Crash, FaultWorld
from dfca.peer.machine import Machine, Memory
from dfca.peer.peer import Peer
from dfca.peer.records.lineage import Lineage
from dfca.peer.records.messages import LARGE, BankCopy, Copy, Report, Update, well_formed
from dfca.peer.records.options import ENDLESS, PeerOptions
from dfca.peer.records.work import LONG, Job, Rest, Train
from dfca.peer.state import Saved, State
from dfca.sim.events.host import make_machine
from dfca.sim.events.world import SERVER

STABLE_S = 30.0  # everything must stay well for this long
MORE_ROUNDS = 2  # rounds that every peer must do after the faults
ROUNDS = 10**9  # no last round
MAX_EVENTS = 400_000  # a world that is not over after this many events, in a minute of faults, hangs
STEPS = {
    "crashes": 20,
    "cuts": 20,
    "late": 5,
    "loss": 5,
    "one_way": 5,
    "corruption": 5,
    "duplication": 2,
    "flaps": 5,
    "flapping": 5,
    "rewires": 5,
    "jumps": 5,
    "rates": 2,
    "garbage": 60,
    "liars": 60,
    "drift_s": 20,
    "merges": 60,
}
"""By kind of fault, the steps allowed to recover from it; 2,100 worlds took two thirds of that at most."""
MERGING = MergeOptions(opens=4, first=3, every=2, steps=1)
TRIES = 30  # a link breaks after losing a message this often in a row


class Event(NamedTuple):
    """What waits in the queue."""

    time: float
    rank: int
    number: int
    act: Callable[..., None]
    arguments: tuple[Any, ...]


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
        self.most_events = MAX_EVENTS * max(1.0, world.faults_s / FAULTS_S)
        self.queue: list[Event] = []
        self.peers: dict[int, Machine] = {}
        self.lives: dict[int, int] = dict.fromkeys(self.ids, -1)
        self.saves: dict[int, list[Saved]] = {i: [] for i in self.ids}
        self.wakes: dict[int, float] = {}
        self.memory: dict[int, Callable[[int], Tensor]] = {}
        self.links = {frozenset(edge): FaultLink() for edge in self.graph.edges}
        self.known: dict[tuple[int, int], int] = {}
        self.away: set[int] = set()
        self.made: dict[tuple[int, int], tuple[Lineage | None, Tensor]] = {}  # see `CheckedRules`
        self.offsets: dict[int, float] = dict.fromkeys(self.ids, 0.0)
        self.rates = dict.fromkeys(self.ids, 1.0) | dict(world.rates)
        self.pending: dict[int, Crash] = {}
        self.writes: dict[int, list[float]] = {}  # by peer, when the save that is being written ends, and the next
        self.one_way = {(sender, to): share for sender, to, share in world.one_way}
        slow = dict(world.slow)
        self.round_s = {i: slow.get(i, 1.0) for i in self.ids}
        self.work = {i: TinyWork(world.number, i, i % world.groups, self._start, self._models) for i in self.ids}
        self.rounds_at_stop: dict[int, int] = {}
        self.inputs: list[tuple[Any, ...]] = []
        self.jobs: list[Job] = []
        self.log_of = log_of
        self.stopped = False
        self.well_since: float | None = None  # since when everything has been well, after the faults
        self.rounds_then: dict[int, int] = {}  # of every peer, when that began
        self.folded: set[tuple[int, int]] = set()  # who has folded a model of whom since

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
            world.weights,
            share,
            robust=world.robust if exchange == "gossip" else "none",
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
                aggregation=world.aggregation,
                timeout_s=4.0,
                local=LocalOptions(steps=1),
                participation=world.participation,
                staleness=_staleness(world.staleness),
                election=ElectionOptions(warmup_steps=2, patience=2, most=max(5, world.clusters or 0)),
                revives=world.algorithm == "dfca-auto",
                merging=merging_of(MERGING if world.merges else None, None, world.clusters),
                personal="auto" if world.rounds else 0,
            ),
            join_s=5.0,
            hang_s=5.0,
        )

    # The clock.

    def push(self, time: float, rank: int, act: Callable[..., None], *arguments: Any) -> None:
        """Plan an event."""
        self.count += 1
        heapq.heappush(self.queue, Event(time, rank, self.count, act, arguments))

    def run(self) -> None:
        """Carry the world out. Raises Violation."""
        self._plan()
        end_s = self.world.faults_s + allowed_s(self.world) + STABLE_S
        while True:
            while self.queue and self.queue[0].time <= self.now:
                self._count(1)
                event = heapq.heappop(self.queue)
                event.act(*event.arguments)
            due = [i for i in sorted(self.peers) if self._due(i) <= self.now]
            if due:
                self._count(len(due))
                for i in due:
                    if i in self.peers:
                        self._call(i, "wake")
                continue
            if self.stopped and self._is_well_for_long():
                return
            soonest = min((self._due(i) for i in self.peers), default=math.inf)
            if self.queue:
                soonest = min(soonest, self.queue[0].time)
            if self.well_since is not None and self.now < self.well_since + STABLE_S < soonest:
                soonest = self.well_since + STABLE_S
            if soonest > end_s:
                raise Violation(f"not well at the end: {self._unwell()}")
            self.now = max(self.now, soonest)

    def _due(self, i: int) -> float:
        return (self.wakes[i] - self.offsets[i]) / self.rates[i]

    def _plan(self) -> None:
        world = self.world
        late = dict(world.late)
        for i in self.ids:
            if i in late:
                self.away.add(i)
                self.push(late[i], 0, self._return, i, None)
            else:
                self._born(i, None, late=False)
        self._update_links()
        for crash in world.crashes:
            self.push(crash.at_s, 0, self._plan_crash, crash)
        for cut in world.cuts:
            self.push(cut.begin_s, 0, self._update_links)
            self.push(cut.end_s, 0, self._update_links)
        for peer, at_s, jump in world.jumps:
            self.push(at_s, 0, self._jump, peer, jump)
        for _ in range(world.flaps):
            if self.links:
                at_s, place = self.rnd.uniform(0, world.faults_s), self.rnd.randrange(len(self.links))
                self.push(at_s, 0, self._break, list(self.links)[place])
        for one, other, every_s in world.flapping:
            for number in range(1, 1 + int(world.faults_s / every_s)):
                self.push(number * every_s, 0, self._break, frozenset((one, other)))
        for _ in range(world.rewires):
            self.push(self.rnd.uniform(0, world.faults_s), 0, self._rewire)
        if world.drift_s:
            self.push(world.drift_s, 0, self._drift)
        if world.swap >= 0:
            self.push(self.rnd.uniform(0, world.faults_s), 3, self._swap, self.ids[world.swap % len(self.ids)])
        self.push(world.faults_s, 0, self._stop)

    def _count(self, events: int) -> None:
        self.handled += events
        if self.handled > self.most_events:
            raise Violation(f"hangs at {self.now:g} s: {self._unwell()}")

    def _finish(self, i: int, life: int, job: Job) -> None:
        peer = self.peers.get(i)
        if peer is None or life != self.lives[i] or (isinstance(job, LONG) and not peer.runs(job)):
            return
        self._call(i, "finished", job, self.work[i].run(job, peer.bank))

    def _plan_crash(self, crash: Crash) -> None:
        i = crash.peer
        if self.stopped or i in self.away:
            return
        if crash.when == "any" or i == SERVER:
            self._crash(i, crash)
        else:
            self.pending[i] = crash

    def _jump(self, i: int, seconds: float) -> None:
        self.offsets[i] += seconds

    def _drift(self) -> None:
        for i in self.ids:
            self.work[i].move_to((i % self.world.groups) + 10 * (i % 2))

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
        peer, now = self.peers[i], self.now * self.rates[i] + self.offsets[i]
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
        self.folded |= {(i, sender) for kind, sender, *_ in ready.noted if kind == "fold"}
        if what != "receive":  # what a message brings is folded in `wake`
            self._check(peer)
        if self._is_struck(i, peer, "in election" if getattr(peer, "wave", None) is not None else ""):
            return
        for job in ready.work:
            takes = self.round_s[i] if isinstance(job, Train | Rest) else 2.0 if isinstance(job, LONG) else 0.0
            self.push(self.now + takes, 1, self._finish, i, self.lives[i], job)
        self._save_then_send(i, peer, peer.save() if ready.save and isinstance(peer, Peer) else None, ready.messages)

    def _is_struck(self, i: int, peer: Machine, moment: str) -> bool:
        """Crash a peer whose crash waits for this moment; return whether it was so."""
        crash = self.pending.get(i)
        if crash is None or crash.when != moment or self.peers.get(i) is not peer:
            return False
        del self.pending[i]
        self._crash(i, crash)
        return True

    def _save_then_send(self, i: int, peer: Machine, saved: Saved | None, messages: list[tuple[int, Any]]) -> None:
        """Write a save, and send the messages that rest on it; further ones wait until it is written.

        Saves that are asked for while one is being written are one.
        """
        writes = self.writes[i] = [end_s for end_s in self.writes.get(i, []) if end_s > self.now]
        if saved is not None:
            if self._is_struck(i, peer, "before save"):
                return
            if self.world.save_s and len(writes) < 2:
                writes.append(max([self.now, *writes]) + self.world.save_s)
            if (crash := self.pending.get(i)) is not None and crash.when == "during save":
                self.push(self.now + self.world.save_s / 2, 0, self._plan_crash, replace(crash, when="any"))
                del self.pending[i]
        if not writes:
            self._end_save(i, self.lives[i], saved, [(to, message, None) for to, message in messages])
        elif saved is not None or messages:
            epochs = [(to, message, self.known.get((i, to))) for to, message in messages]
            self.push(writes[-1], 0, self._end_save, i, self.lives[i], saved, epochs)

    def _end_save(self, i: int, life: int, saved: Saved | None, messages: list[tuple[int, Any, int | None]]) -> None:
        """Send what rests on a save that is written now, over links that did not go down meanwhile."""
        peer = self.peers.get(i)
        if peer is None or life != self.lives[i]:
            return
        if saved is not None:
            self.saves[i] = [*self.saves[i][-3:], saved]
            if self._is_struck(i, peer, "after save"):
                return
        for to, message, epoch in messages:
            if epoch is None or epoch == self.known.get((i, to)):
                self._send(i, to, message)

    def _crash(self, i: int, crash: Crash) -> None:
        del self.peers[i]
        self.away.add(i)
        self.lives[i] += 1
        self.writes.pop(i, None)
        self._update_links(i)
        kept = self.saves[i]
        saved = None
        if crash.keeps == "save" and kept:
            saved = kept[-1]
        elif crash.keeps == "old" and kept:
            saved = kept[0]
        self.push(min(self.world.faults_s, self.now + crash.away_s), 0, self._return, i, saved)

    def _return(self, i: int, saved: Saved | None) -> None:
        if i in self.peers:
            return
        self._born(i, saved, late=True)
        self._update_links(i)

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
        self.stopped = True
        self.pending.clear()
        self.world = replace(self.world, loss=0.0, duplication=0.0, corruption=0.0, garbage=(), liars=())
        self.one_way = {}
        for i in self.ids:
            if i not in self.peers:
                self.push(self.now, 0, self._return, i, self.saves[i][-1] if self.saves[i] else None)
        self._update_links()
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
            self.push(self.now + self.rnd.uniform(0, 1.0), 0, self._take_neighbours, end)

    def _take_neighbours(self, i: int) -> None:
        if i in self.peers:
            self._call(i, "rewire", tuple(self.graph.neighbors(i)))
        self._update_links(i)

    def _wanted_up(self, link: frozenset[int]) -> bool:
        if any(i not in self.peers for i in link) or not self._is_edge(*link):
            return False
        if self.stopped:
            return True
        one, other = link
        return not any(cut.splits(one, other, self.now) for cut in self.world.cuts)

    def _is_edge(self, one: int, other: int) -> bool:
        """Return whether both ends know that they are neighbours."""
        ends = ((self.peers[one], other), (self.peers[other], one))
        return all(not isinstance(peer, Peer) or end in peer.neighbours for peer, end in ends)

    def _update_links(self, end: int | None = None) -> None:
        for link, state in self.links.items():
            if end not in (None, *link) or (up := self._wanted_up(link)) == state.up:
                continue
            state.up = up
            state.epoch += 1
            state.last.clear()
            for i in link:
                (other,) = link - {i}
                later = self.rnd.uniform(0, 2.0) if not up else 0.0
                self.push(self.now + later, 0, self._notice, i, other, state.epoch, up)

    def _break(self, link: frozenset[int]) -> None:
        """Break a link for a moment: what is on its way is lost."""
        state = self.links.get(link)
        if state is None or not state.up or self.stopped:
            return
        state.up = False
        state.epoch += 1
        self.push(self.now + 0.2, 0, self._update_links)
        for i in link:
            (other,) = link - {i}
            self.push(self.now + self.rnd.uniform(0, 0.4), 0, self._notice, i, other, state.epoch, False)

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
        world, rnd = self.world, self.rnd
        if i in world.garbage and rnd.random() < 0.3:
            message = garble(message, rnd)
        if i in world.liars and rnd.random() < 0.5 and well_formed(message):  # who sends garbage may lie as well
            message = lie(message, rnd)
        self._remember(to, message)
        if not link.up or self.known.get((i, to)) != link.epoch:
            return
        longest = world.longest
        delay = world.delay_s * (min(longest, math.exp(world.spread * rnd.gauss(0, 1))) if world.spread else 1.0)
        if (share := self.one_way.get((i, to))) is not None:
            tries = next((tries for tries in range(TRIES) if rnd.random() >= share), TRIES)
            if tries and isinstance(message, Update):
                return
            if tries == TRIES:
                self._break(frozenset((i, to)))
                return
            delay += tries * (2 * world.delay_s + 0.1)
        if isinstance(message, LARGE):
            delay *= rnd.choice((1.0, 1.0, 3.0)) if world.spread else 1.0
            if isinstance(message, Update):
                if rnd.random() < world.loss:
                    return
                if rnd.random() < world.duplication:
                    self.push(self.now + delay * rnd.uniform(0.5, 3), 2, self._deliver, to, i, link.epoch, message)
                if rnd.random() < world.corruption and well_formed(message):
                    message = corrupt(message, rnd)
                    self.made.setdefault((to, id(message.message.model)), (None, message.message.model))
            elif rnd.random() < world.loss:
                delay += 2 * world.delay_s + 0.1
            at = self.now + delay
        else:
            if rnd.random() < world.loss:
                delay += 2 * world.delay_s + 0.1
            at = max(self.now + delay, link.last.get(to, 0.0))
            link.last[to] = at
        self.push(at, 2, self._deliver, to, i, link.epoch, message)

    def _remember(self, to: int, message: Any) -> None:
        """Keep of which lineage a model claims to be when it is sent."""
        kinds = Update | Copy | BankCopy | Report
        if isinstance(message, kinds) and well_formed(message) and message.message is not None:
            lineage = () if isinstance(message, Report) else message.lineage
            self.made[to, id(message.message.model)] = (lineage, message.message.model)

    def _deliver(self, i: int, sender: int, epoch: int, message: Any) -> None:
        link = self.links[frozenset((i, sender))]
        if i in self.peers and link.up and link.epoch == epoch and self.known.get((i, sender)) == epoch:
            self._call(i, "receive", sender, message)

    # What must hold.

    def _check(self, peer: Machine) -> None:
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
        if curves.measured and curves.sound and not all(math.isfinite(value) for row in curves.rows for value in row):
            raise Violation(f"peer {peer.id} has a curve that is not finite")

    def _problems(self) -> Iterator[str]:
        for i in self.ids:
            peer = self.peers.get(i)
            if peer is None or peer.bank is None:
                yield f"peer {i} has no models ({'away' if peer is None else peer.waits()})"
            elif peer.round < min(self.rounds, self.rounds_at_stop.get(i, 0) + MORE_ROUNDS):
                yield f"peer {i} is in round {peer.round} ({peer.state.name.lower()}, {peer.waits()})"
            elif peer.round >= self.rounds:
                yield from self._unpicked(i, peer)
        for part in nx.connected_components(self.graph):
            members = [peer for i in sorted(part) if isinstance(peer := self.peers.get(i), Peer)]
            lineages = {peer.lineage for peer in members}
            sizes = {len(peer.bank) for peer in members if peer.bank is not None}
            if len(lineages) > 1 or len(sizes) > 1:
                yield f"{len(lineages)} lineages and {len(sizes)} sizes among {sorted(part)}"

    def _unpicked(self, i: int, peer: Machine) -> Iterator[str]:
        """Say what is missing at a peer that has ended: it has picked its steps, and done its sweeps."""
        if peer.state is not State.DONE:
            yield f"peer {i} is {peer.state.name.lower()} after its last round"
        elif isinstance(peer, Peer):
            curves = peer.last_step.curves
            sweeps = len(curves.rows) - 1
            if sweeps < SWEEPS and curves.alike(peer.links):
                yield f"peer {i} has done {sweeps} sweeps"

    def _is_well_for_long(self) -> bool:
        """Return whether all has been well for long, and every peer has done a round and heard all neighbours since."""
        if next(self._problems(), None) is not None:
            self.well_since = None
            return False
        if self.well_since is None:
            self.well_since, self.folded = self.now, set()
            self.rounds_then = {i: peer.round for i, peer in self.peers.items()}
        return self.now >= self.well_since + STABLE_S and next(self._standstills(), None) is None

    def _standstills(self) -> Iterator[str]:
        """Say who has done no round, or folded no model of a neighbour, since all has been well."""
        training = {i for i, peer in self.peers.items() if peer.round < self.rounds}
        for i in sorted(training):
            if self.peers[i].round == self.rounds_then[i]:
                yield f"peer {i} stays in round {self.rounds_then[i]} ({self.peers[i].waits()})"
        for i, other in sorted(self.graph.edges):
            for pair in ((i, other), (other, i)):
                if training.issuperset(pair) and not self.server and pair not in self.folded:
                    yield f"peer {pair[0]} folds no model of peer {pair[1]}"

    def _unwell(self) -> str:
        problems = list(self._problems())[:4] or list(self._standstills())[:4]
        return "; ".join(problems) or f"all is well since {self.well_since:g} s, which is too short"


def allowed_s(world: FaultWorld) -> float:
    """Return the seconds allowed to recover after the last fault of a world: 120, and a number of steps of its peers.

    A step is the slowest round, a message there and back that is slower than 97 of 100, and a save.
    """
    delay_s = world.delay_s * (min(world.longest, math.exp(2 * world.spread)) if world.spread else 1.0)
    slowest_s = max([1.0, *(round_s for _, round_s in world.slow)])
    step_s = (slowest_s + 2 * delay_s + world.save_s) / min([1.0, *(rate for _, rate in world.rates)])
    steps = 10 + sum(STEPS[fault] for fault in STEPS if getattr(world, fault))
    steps += world.rounds if world.rounds < ENDLESS else 0  # the sweeps wait for the last peer's last round
    steps += 30 if world.algorithm in ELECTED else 0
    return 120.0 + step_s * steps


def _staleness(kind_and_unit: str) -> Staleness:
    kind, _, unit = kind_and_unit.partition(" ")
    return Staleness(kind, unit=unit) if kind else Staleness()  # type: ignore[arg-type]
