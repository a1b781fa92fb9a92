"""The asynchronous simulator: a virtual clock drives the peers of `dfca.peer` through a world of links and faults.

A peer runs its own rounds at its own pace (`peer.peer` says what it does; with a server, `peer.server`). This file says
when: how long its work takes, who is there, when the samples change, when everybody is scored. `links` carries
messages, `pool` does the work, `host` hands both to the peers.

**An instant.** All events of one time are handled: changes of the world, then what the failure detector notices, ends
of jobs, departures, deliveries; within a kind in the order in which they were made. Then work that takes no time is
done, in one call. When nothing is left, the peers that are due are woken in ascending order, and what comes of it is
handled, until nobody is due. So models that are trained at the same instant all meet before the next round begins, and
in the ideal world this simulator computes what the synchronous one does (a test says so, for every algorithm).

**Absence.** Who leaves loses everything but its save (its models, where the churn `keeps` them), and returns as a new
incarnation. A client that is not there from the begin on joins late, without models.

**Drift.** The samples of all clients change at one instant: when the first of them begins the round of the drift. Who
trains at that moment ends its round on the new ones.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop
from typing import Any

from torch import Tensor, nn

from dfca.base.errors import ConfigError, RunError
from dfca.core.rules.merging import JUDGED
from dfca.core.rules.personal import GRID
from dfca.peer.packing import KNOWN, Packer, Unpacker, records_of
from dfca.peer.records.work import Curve, Job, Observe, Personalise, Train, WarmUp
from dfca.sim.events import books, links
from dfca.sim.events.books import EventResult, Line, RunLog
from dfca.sim.events.clock import CHANGE, DEPART, FINISH, Clock, Event, Processor
from dfca.sim.events.host import PeerHost, peer_options
from dfca.sim.events.links import Links
from dfca.sim.events.options import EventOptions
from dfca.sim.events.pool import ClientPool
from dfca.sim.events.replay import Replay
from dfca.sim.events.world import FLOAT_BYTES, SERVER, World
from dfca.sim.metrics_table import EvaluationRow
from dfca.sim.setting import Setting

COLLECT_AFTER = 50_000
"""New records between two collections of garbage (Python's default, 700, takes a quarter of a run without training)."""
AHEAD = (Train, WarmUp)
"""Jobs that may be done before they end."""
STORED = {**KNOWN, **records_of((books, links)), "Record": books.TraceRecord}  # its name in 0.2
"""The classes that a checkpoint holds: those of peers (`peer.packing`), and what is on its way."""
_FACTS = ("handled", "done", "_scored_at", "_scored_last", "_due", "_due_s", "_stays", "_returns")


class EventSimulation:
    """A simulation in virtual time; `setting.aggregation` says sequential or batch, `options` when it ends.

    `run` does all of it. `step` runs to the next evaluation or mean round; between steps `state` and `restore` carry
    the simulation over a restart, bit by bit.
    """

    def __init__(self, setting: Setting, world: World | None = None, options: EventOptions | None = None) -> None:
        self.options = options = options or EventOptions()
        self.setting, self.world, clients = setting, world or World(), setting.clients
        self.until_s = math.inf if options.until_s is None else options.until_s
        if setting.algorithm.peers is not None:
            raise ConfigError(
                f"{setting.algorithm.name} chooses its peers by the losses of their models, which no peer in virtual "
                "time can ask for; run it in rounds, without a world"
            )
        rounds = options.rounds or (setting.rounds if options.until_s is None else 0)
        if setting.quiet_rounds and not rounds:
            raise ConfigError(
                f"quiet rounds are the last ones, and this run ends by time: got mixing.quiet_rounds = "
                f"{setting.quiet_rounds} with until_s; give rounds too, or set it to 0"
            )
        self.pool = ClientPool(setting, options.dry, rounds)
        self.model_bytes = self.pool.start.sent_size * FLOAT_BYTES
        near = neighbours_of(setting)
        self.world.check(list(map(len, near[:clients])), self.model_bytes, options.timeout_s)
        self.clock, self.books = Clock(), RunLog(clients, options.trace)
        payload_bytes = self.pool.start.payload_bytes
        self.links = Links(self.world, near, self.model_bytes, setting.seed, self.clock, self.books, payload_bytes)
        peers = peer_options(
            setting,
            self.pool,
            near,
            rounds or sys.maxsize,
            timeout_s=options.timeout_s,
            staleness=options.staleness,
            quorum=options.quorum,
        )
        self.host = PeerHost(peers, self.pool, self.books)
        self.links.ends, self.host.send, self.host.begun = self.host, self.links.send, self._on_begun
        slowdowns = self.world.compute.slowdowns(setting.seed, clients)
        self._step_s = [self.world.compute.step_s * slowdown for slowdown in slowdowns]
        self._round_steps = [max(1, self.pool.steps(self.pool.models, n)) for n in self.pool.start.train.sizes]
        self.handled = 0
        self.done = False
        self._scored_at, self._scored_last = -1, False
        self._due = setting.evaluate_every * clients
        self._due_s = options.evaluate_every_s or math.inf
        self._stays = [0] * clients
        self._returns: set[int] = set()
        self._drifter: int | None = None
        self._processors: dict[int, Processor] = {}  # of clients that observe
        self._ends: dict[int, tuple[float, Job]] = {}  # of running jobs, which the queue holds among all messages

    # The run as a whole.

    @property
    def round(self) -> int:
        """How many rounds the clients have done on average, rounded down."""
        return self.books.rounds_done

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.clock.now

    @property
    def banks(self) -> Tensor:
        """The models of all clients, (m, N, P), or the server's (m, 1, P)."""
        return self.pool.fill(self.host.held())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        return self.pool.notes(*self.host.clusters(), self.books.rounds_done if self.done else None)

    def run(self) -> EventResult:
        """Run to the end.

        Raises RunError where no client can continue before the end, with who waits for whom, or after `max_events`.
        """
        if self.done:
            raise RunError("this simulation has been run; make a new one")
        while not self.done:
            self.step()
        return self.result()

    def step(self) -> EvaluationRow | None:
        """Run to the next evaluation, and return its row, or until the clients have done a round more on average.

        Raises RunError as `run` does.
        """
        if self.options.replay is not None:
            Replay(self.host, self.options.replay, self.world.churn.keeps).run()
            self.done = True
            return next(reversed(self.host.metrics), None)
        with rare_collections():
            return self._step()

    def _step(self) -> EvaluationRow | None:
        before = self.books.rounds_done
        if not self.handled:
            self._begin()
        while not self._is_over(time := self._next_time()):
            self.clock.now = self.host.now = min(time, self._due_s)
            self._handle_instant()
            row = self._evaluate(self._is_last()) if self._is_evaluated() else None
            if self._drifter is not None:
                self.host.drift(self._drifter)
                self._drifter = None
            if row is not None:
                return row
            if self.books.rounds_done > before:
                return None
        self.done = True
        self.host.drop_ahead()
        self.host.enter_notes()
        self.clock.now = self.host.now = self.until_s if self.until_s < math.inf else self.clock.now
        complete = self._scored_last or self.options.dry or not self.pool.last_step.active
        return None if complete and self._scored_at == self.books.kinds.total() else self._evaluate(final=True)

    def personal_model(self, client: int) -> nn.Module:
        """Make the module that a client deploys at the end: with its personal last step, if it takes one."""
        if not 0 <= client < self.setting.clients:
            raise ConfigError(f"client must be in 0..{self.setting.clients - 1}, got {client}")
        steps = self.host.personal_steps()[client]
        return self.pool.flat.to_module(self.pool.personal_vector(client, self.host.held(), steps))

    def take_trace(self) -> list[Line]:
        """Hand over the trace since the last call, and forget it."""
        return self.books.take_trace()

    def end_trace(self) -> None:
        """Keep no trace from now on: what happens after is in the books alone, which takes less time."""
        self.books.trace = None

    def result(self) -> EventResult:
        """Sum up what happened so far."""
        return self.host.result()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that a checkpoint needs: tensors, and facts that JSON can hold. The tensors are not copies.

        A trace that nobody has taken is among the facts.
        """
        self.host.enter_notes()
        banks = self.pool.fill(self.host.held())
        packer = Packer(banks, STORED)
        clock = {"now": self.clock.now, "made": self.clock.made, "queue": self._packable_queue()}
        facts = {
            "clock": clock,
            "books": self.books.state(),
            "links": self.links.state(),
            "pool": self.pool.state(),
            "host": self.host.state(),
            "own": {name: getattr(self, name) for name in _FACTS},
            "processors": [processor.state(i) for i, processor in self._processors.items()],
        }
        packed = {name: packer.pack(part) for name, part in facts.items()}
        return {**packer.tensors, "bank": banks}, packed

    def restore(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from a state."""
        stored, fresh = tuple(tensors["bank"].shape), tuple(self.banks.shape)
        if stored[1:] != fresh[1:]:
            raise ConfigError(f"the checkpoint's bank is {stored}, this run's {fresh}")
        self.pool.restore(Unpacker(tensors, known=STORED).unpack(facts["pool"]), tensors["bank"])
        unpacker = Unpacker(tensors, self.pool.banks, STORED)
        own = unpacker.unpack(facts["own"])
        for name in _FACTS:
            setattr(self, name, own.get(name, getattr(self, name)))  # one that is added later has its first value
        self.books.restore(unpacker.unpack(facts["books"]))
        self.links.restore(unpacker.unpack(facts["links"]))
        self.host.restore(unpacker.unpack(facts["host"]))
        for i, now, rounds_s, beside_s in unpacker.unpack(facts.get("processors", [])):
            peer, processor = self.host.peers[i], Processor(self.world.compute.background, now)
            if peer is not None:
                processor.restore(peer.job, rounds_s, peer.background, beside_s)
                self._processors[i] = processor
        clock = unpacker.unpack(facts["clock"])
        self.clock.now, self.clock.made = clock["now"], clock["made"]
        for event in clock["queue"]:
            if event[1] == FINISH:
                peer = self.host.peers[event[3]]
                job = peer.background if len(event) > 4 else peer.job
                if job is None:  # of an older version
                    continue
                event = (*event[:4], job)
                if job is peer.job:
                    self._ends[event[3]] = event[0], job
            self.clock.queue.append(tuple(event))
        self.clock.changes = sum(event[1] == CHANGE for event in self.clock.queue)

    def _packable_queue(self) -> list[list[Any]]:
        """Return the events to come in order; of jobs, those that run: a peer knows its job."""
        events = sorted(self.clock.queue, key=lambda event: event[:3])
        peers, packed = self.host.peers, []
        for event in events:
            if event[1] != FINISH:
                packed.append(list(event))
            elif self._is_running(event):
                beside = event[4] is peers[event[3]].background  # type: ignore[union-attr]
                packed.append([*event[:4], True] if beside else list(event[:4]))
        return packed

    def _is_running(self, event: Event) -> bool:
        """Return whether a job ends with this event: it was not broken off, and its end is not another by now."""
        time, _, _, i, job = event
        peer, processor = self.host.peers[i], self._processors.get(i)
        if peer is None or not peer.runs(job):
            return False
        return processor is None or (job, time) in processor.planned

    # The clock.

    def _begin(self) -> None:
        clock, host, world = self.clock, self.host, self.world
        late = {joiner.client: joiner.at_s for joiner in world.late_joiners}
        late |= {absence.client: absence.end_s for absence in world.absences if absence.begin_s == 0}
        for i, at_s in sorted(late.items()):
            self.books.note(0.0, "absent", i)
            self._plan_return(i, at_s)
        for absence in world.absences:
            if absence.begin_s > 0:
                clock.push(absence.begin_s, CHANGE, "leave", absence.client, absence.end_s)
        for number, partition in enumerate(world.partitions):
            clock.push(partition.begin_s, CHANGE, "split", number, None)
            if partition.end_s < math.inf:
                clock.push(partition.end_s, CHANGE, "heal", number, None)
        while clock.queue and clock.queue[0][0] == 0 and clock.queue[0][3] == "split":
            self._on_change(clock.pop())
        present = [i for i in range(self.setting.clients) if i not in late]
        for i in present:
            self._plan_leave(i)
        for i in [*present, *([SERVER] if self.pool.shared else [])]:
            host.begin(i, late=False)
        for i in [*present, *([SERVER] if self.pool.shared else [])]:
            self.links.arrive(i)
        self.handled = 1

    def _next_time(self) -> float:
        timer, queue = self.host.next_timer(), self.clock.queue
        if self.host.due or self.host.short:
            return self.clock.now
        return min(queue[0][0], timer) if queue else timer

    def _is_over(self, time: float) -> bool:
        """Return whether the run has ended, where `time` is next; raises RunError where no client can continue."""
        if self._is_all_done():
            return True
        if time == math.inf:
            self._diagnose()
        return min(time, self._due_s) > self.until_s

    def _is_all_done(self) -> bool:
        """Return whether everybody has done all rounds, and nothing is on its way but changes of the world."""
        if self.clock.live or self.host.due or self.host.short:
            return False
        if self.pool.shared and self.host.is_done(SERVER):
            return True
        return all(
            self.host.is_done(i) or (self.host.peers[i] is None and i not in self._returns)
            for i in range(self.setting.clients)
        )

    def _handle_instant(self) -> None:
        """Handle everything of this time; and of the next, while all that happens is that messages travel."""
        clock, host, queue, end_s = self.clock, self.host, self.clock.queue, min(self._due_s, self.until_s)
        deliver, depart, most = self.links.on_deliver, self.links.on_depart, self.options.max_events
        quiet, asked, other_s = True, False, 0.0
        while True:
            now = clock.now
            while queue and queue[0][0] <= now:
                if queue[0][1] < DEPART:
                    quiet = False
                    self._handle(clock.pop())
                    continue
                event = heappop(queue)
                self.handled += len(event[3].receivers)
                if self.handled > most:
                    self._count(0)
                elif event[1] == DEPART:
                    depart(event)
                else:
                    deliver(event)
            if host.short:
                quiet = False
                for done in host.do_short_jobs():
                    host.finish(done)
            elif host.touched or not asked:
                due = host.take_due()
                asked, other_s = not due, min(end_s, host.next_timer())
                quiet = quiet and asked
                for i in due:
                    self._count()
                    host.feed(i, "wake")
            elif quiet and queue and queue[0][0] < other_s and queue[0][1] >= DEPART:
                clock.now = host.now = queue[0][0]  # nobody else has anything to do before
            else:
                return

    def _handle(self, event: Event) -> None:
        self._count()
        kind = event[1]
        if kind == FINISH:
            self._on_finish(event)
        elif kind == CHANGE:
            self._on_change(event)
        else:
            self.links.on_notice(event)

    def _count(self, events: int = 1) -> None:
        self.handled += events
        if self.handled > (most := self.options.max_events):
            raise RunError(
                f"stopped after max_events = {most} events, at {self.clock.now:g} s of virtual time and "
                f"{self.books.rounds_done} rounds on average; end sooner by until_s or rounds, or raise max_events"
            )

    # Work.

    def _on_begun(self, i: int, job: Job) -> None:
        now, seconds = self.clock.now, self._seconds(i, job)
        peer, processor = self.host.peers[i], self._processors.get(i)
        if peer is not None and job is peer.background:
            self._begin_beside(i, job, seconds)
        elif processor is not None:
            processor.advance(now)
            processor.rounds = job, seconds
            self._plan_ends(i, processor)
        else:
            self._plan_end(i, job, now + seconds)

    def _seconds(self, i: int, job: Job) -> float:
        """Return how long a job takes a client that does nothing else."""
        merging, drift = self.setting.merging, self.setting.drift
        if isinstance(job, WarmUp):
            return self._step_s[i] * self.setting.algorithm.election.warmup_steps
        if isinstance(job, Observe):
            return 0.0 if merging is None else self._step_s[i] * merging.steps * JUDGED
        if isinstance(job, Curve | Personalise):
            return self._step_s[i] * (GRID[-1] if isinstance(job, Curve) else job.steps)
        round: int = job.round  # type: ignore[union-attr]
        if drift is not None and not self.pool.drifted and self._drifter is None and round >= drift[0]:
            self._drifter = i
        steps = 1 if self.pool.is_quiet(round) else self._round_steps[i]
        return self._step_s[i] * steps * self.world.compute.noise(self.setting.seed, i, round)

    def _plan_end(self, i: int, job: Job, end_s: float) -> None:
        if (peer := self.host.peers[i]) is not None and job is peer.job:
            self._ends[i] = end_s, job
        self.clock.push(end_s, FINISH, i, job)

    def _begin_beside(self, i: int, job: Job, seconds: float) -> None:
        """Begin a job beside the one that a client's rounds run."""
        now, share = self.clock.now, self.world.compute.background
        if not share:
            self.clock.push(now, FINISH, i, job)
            return
        if (processor := self._processors.get(i)) is None:
            processor = self._processors[i] = Processor(share, now)
            running = self.host.peers[i].job  # type: ignore[union-attr]
            if (end := self._ends.get(i)) is not None and end[1] is running:
                processor.rounds = end[1], end[0] - now
        processor.advance(now)
        processor.beside = job, seconds
        self._plan_ends(i, processor)

    def _plan_ends(self, i: int, processor: Processor) -> None:
        """Plan when the jobs of a client that observes end."""
        peer = self.host.peers[i]
        processor.drop(*((None, None) if peer is None else (peer.job, peer.background)))
        before, processor.planned = processor.planned, processor.ends()
        for job, end_s in processor.planned:
            if (job, end_s) not in before:
                self._plan_end(i, job, end_s)
        if processor.beside is None:
            del self._processors[i]

    def _on_finish(self, event: Event) -> None:
        """End all jobs of this instant that were not cancelled; one call does them and running ones of their kinds."""
        clock, peers, ended = self.clock, self.host.peers, [event]
        while clock.queue and clock.queue[0][0] == event[0] and clock.queue[0][1] == FINISH:
            self._count()
            ended.append(clock.pop())
        running = list({id(event[4]): event for event in ended if self._is_running(event)}.values())
        for _, _, _, i, _ in running:
            if (processor := self._processors.get(i)) is not None:
                processor.advance(clock.now)
        beside = [i for _, _, _, i, job in running if peers[i].background is job]  # type: ignore[union-attr]
        rounds = [i for _, _, _, i, job in running if peers[i].job is job]  # type: ignore[union-attr]
        for done in self.host.do_background(beside):
            self.host.finish(done)
        if rounds:
            for done in self.host.do_jobs(rounds, self._outstanding(rounds)):
                self.host.finish(done)
        for i in {*beside, *rounds} & self._processors.keys():
            self._plan_ends(i, self._processors[i])

    def _outstanding(self, ending: Sequence[int]) -> list[int]:
        """List the clients whose running jobs are of the same kinds as those that end now, the first to end first."""
        host, kinds = self.host, set()
        for i in ending:
            if (end := self._ends.pop(i, None)) is not None and i not in host.ahead and isinstance(end[1], AHEAD):
                kinds.add(type(end[1]))
        room = self.pool.most_ahead - len(host.ahead) if kinds else 0
        if room <= 0:
            return []
        ends = [
            (end_s, i)
            for i, (end_s, job) in self._ends.items()
            if type(job) in kinds
            and end_s <= self.until_s
            and i not in host.ahead
            and (peer := host.peers[i]) is not None
            and peer.job is job  # it was not broken off
        ]
        return [i for _, i in sorted(ends)[:room]]

    def _is_evaluated(self) -> bool:
        """Return whether an evaluation is due, and plan the next."""
        if self.options.evaluate_every_s is not None:
            due = self.clock.now >= self._due_s
            self._due_s += self.options.evaluate_every_s if due else 0.0
            return due
        due = self.books.finished >= self._due
        while self.books.finished >= self._due:
            self._due += self.setting.evaluate_every * self.setting.clients
        return due

    def _is_last(self) -> bool:
        """Return whether nothing is left to be done, or no time for it."""
        return self._is_all_done() or min(self._next_time(), self._due_s) > self.until_s

    def _evaluate(self, final: bool) -> EvaluationRow:
        row = self.host.evaluate(final)
        self._scored_at, self._scored_last = self.books.kinds.total(), final
        return row

    # Who is there.

    def _on_change(self, event: Event) -> None:
        what, i, detail = event[3:]
        if what == "leave":
            self._leave(i, detail)
        elif what == "return":
            self._returns.discard(i)
            self.books.note(self.clock.now, "return", i)
            self._plan_leave(i)
            self.host.begin(i, late=self.host.saved[i] is None)
            self.links.arrive(i)
        else:
            self.books.note(self.clock.now, what, 0, round=i)
            self.links.cut(i, closed=what == "split")

    def _plan_leave(self, i: int) -> None:
        """Draw when a client leaves."""
        churn = self.world.churn
        if churn.leaves_per_s:
            self._stays[i] += 1
            stay = churn.stay(self.setting.seed, i, self._stays[i])
            self.clock.push(self.clock.now + stay, CHANGE, "leave", i, None)

    def _leave(self, i: int, until_s: float | None) -> None:
        churn = self.world.churn
        self.books.note(self.clock.now, "leave", i)
        self.host.leave(i, churn.keeps)
        self._ends.pop(i, None)
        if until_s is None:
            until_s = self.clock.now + churn.absence(self.setting.seed, i, self._stays[i])
        self._plan_return(i, until_s)
        self.links.leave(i)

    def _plan_return(self, i: int, at_s: float) -> None:
        if at_s < math.inf:
            self._returns.add(i)
            self.clock.push(at_s, CHANGE, "return", i, None)

    def _diagnose(self) -> None:
        """Raise RunError with who waits for whom."""
        waits = self.host.waits()
        shown = "; ".join(waits[:6]) + (f"; and {len(waits) - 6} more" if len(waits) > 6 else "")
        lost = self.books.kinds["lost"] + self.books.kinds["corrupt"]
        advice = "give timeout_s" if self.pool.shared else 'give timeout_s, or use aggregation "sequential"'
        raise RunError(
            f"no client can continue at {self.clock.now:g} s: {shown} ({lost} messages were lost or broken on the way)"
            f"; {advice}"
        )


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage in cycles rarely: peers make none, and the many small records of an instant set it off."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], COLLECT_AFTER) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def neighbours_of(setting: Setting) -> list[list[int]]:
    """List the neighbours of each client; with a server, it is the only one, and its clients come last."""
    clients = setting.clients
    if setting.algorithm.exchange == "server":
        return [*([SERVER] for _ in range(clients)), list(range(clients))]
    if setting.algorithm.exchange == "none":
        return [[] for _ in range(clients)]
    return [sorted(setting.graph.neighbors(i)) for i in range(clients)]
