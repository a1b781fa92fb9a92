"""The asynchronous simulator: a virtual clock and an event queue drive the sans-I/O clients of `core.client`.

Each client runs its own rounds at its own pace. A round: choose and train (takes the world's compute time), send, then

  sequential   fold what came while it trained and go on at once; what comes later waits in the mailbox
  batch        wait until every neighbour in reach has sent its model of this round, or for `timeout_s`, fold, go on

With a server (ifca, fedavg, oracle) the clients upload what they trained, the server waits for all clients of the round
that are in reach, takes the mean of each cluster and sends all models to everybody: it is bound by the slowest. Its own
uplink is not shared: a client's download takes its own bandwidth.

**Order.** Events at the same instant are handled by kind: changes of the world, ends of training, departures, arrivals,
requests, folds, timeouts, elections, evaluations, starts of rounds; within a kind in the order in which they were made.
So models that are trained at the same instant all meet before the next round begins, and in the ideal world this
simulator computes what the synchronous one does (a test says so, for every algorithm).

**Mailbox.** A message of an older round than the newest seen from its sender for its cluster is dropped, so duplicates
and overtaken messages do nothing. While a client trains, its mailbox keeps the newest message per sender and cluster;
under `batch`, where a neighbour can be one round ahead, the newest two. An uplink that cannot keep up drops the models
that were overtaken before they left. A trained model is one snapshot, shared by all its receivers. So memory is bounded
by the banks, the graph's edges and what is on its way.

**Staleness.** A message weighs by its age: `sim.staleness`. **Links, faults, repeats:** `sim.transport`.
**Elections, revival:** `sim.elections`.

**Relay.** Offers travel with the models. At the end of its round a client asks for the copies that `core.relay` lets
it choose among what was offered since its last one; under `batch` it waits for them, else it folds them when they come.
The copy is the holder's as of the moment it is asked. Rounds date a copy, so among clients of unequal speed the copies
of the fast ones count as fresher.

**Churn.** A client that leaves loses the work of its round, its mailbox and its outbox. When it returns it goes on with
the round that its neighbours are in. A client without models (a late joiner, or one that returns empty) asks all
neighbours for all their models, folds what comes as equals, and begins once each cluster has come, as a rule with the
bank of the first that answers. Neighbours know who is in reach: nobody waits for a client that is away.

**Drift.** The samples of all clients change at one instant: when the first of them begins the round of the drift. Who
trains at that moment ends its round on the new ones.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dfca.errors import ConfigError, RunError
from dfca.sim.events.attendance import Attendance
from dfca.sim.events.elections import Elections
from dfca.sim.events.fleet import Fleet
from dfca.sim.events.mailroom import Mailroom
from dfca.sim.events.server import Server
from dfca.sim.events.snapshot import Packer, Unpacker
from dfca.sim.events.stage import (
    ASK,
    CHANGE,
    CLOSE,
    DELIVER,
    DEPART,
    EVALUATE,
    FINISH,
    FLUSH,
    SETTLE,
    START,
    TIMEOUT,
    WATCH,
    Packet,
    Stage,
)
from dfca.sim.events.staleness import Staleness
from dfca.sim.events.trace import EventResult, Record, replay
from dfca.sim.events.transport import Transport
from dfca.sim.events.world import FLOAT_BYTES, SERVER, World
from dfca.sim.setting import Setting

MAX_EVENTS = 100_000_000
"""A run ends here at the latest: no setting may run for ever."""


class EventSimulation:
    """A simulation in virtual time, until `until_s` seconds or until every client has done `rounds` rounds.

    Without either, the setting's rounds. `setting.aggregation` says sequential or batch. evaluate_every_s None:
    whenever clients have done `setting.evaluate_every` more rounds on average. quorum: the share of the clients that an
    election waits for. trace: keep all records. replay: the records of an earlier run of the same setting; nothing is
    drawn and no clock runs, the records are carried out, and the result is bit-identical. dry: nothing is trained,
    folded, elected or scored: the clockwork alone.

    `run` does all of it. `step` goes on to the next evaluation or mean round; between steps `state` and `restore` carry
    the simulation over a restart, bit by bit.
    """

    def __init__(
        self,
        setting: Setting,
        world: World | None = None,
        *,
        until_s: float | None = None,
        rounds: int | None = None,
        timeout_s: float | None = None,
        staleness: Staleness | None = None,
        evaluate_every_s: float | None = None,
        quorum: float = 0.8,
        trace: bool = False,
        replay: Sequence[Record] | None = None,
        dry: bool = False,
        max_events: int = MAX_EVENTS,
    ) -> None:
        for name, value in (("until_s", until_s), ("evaluate_every_s", evaluate_every_s)):
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{name} must be > 0 and finite, got {value}")
        if rounds is not None and rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {rounds}")
        if not 0 < quorum <= 1:
            raise ConfigError(f"quorum must be in (0, 1], got {quorum}")
        self.setting, self.world, self.timeout_s = setting, world or World(), timeout_s
        self.until_s = math.inf if until_s is None else until_s
        self.every_s, self.max_events, self.replay = evaluate_every_s, max_events, replay
        self.fleet = Fleet(setting, dry)
        self.model_bytes = self.fleet.size * FLOAT_BYTES
        rounds = rounds or (setting.rounds if until_s is None else sys.maxsize)
        self.stage = Stage(setting, self.world, self.fleet, staleness or Staleness(), rounds, trace)
        self.ledger, self.nodes, self.near = self.stage.ledger, self.stage.nodes, self.stage.near
        self.transport = Transport(self.stage, self.model_bytes)
        slowdowns = self.world.compute.slowdowns(setting.seed, setting.clients)
        step_s = [self.world.compute.step_s * slowdown for slowdown in slowdowns]
        self._round_s = [each * max(1, setting.local.steps) for each in step_s]
        elects = (setting.algorithm.start == "elected" or setting.algorithm.revives) and not dry
        warm_s = [each * setting.algorithm.election.warmup_steps for each in step_s]
        self._elected = elects and setting.algorithm.start == "elected"
        self.elections = Elections(self.stage, self.transport, quorum, warm_s) if elects else None
        self.server = Server(self.stage, self.transport, timeout_s) if self.fleet.shared else None
        self.mailroom = Mailroom(self.stage, self.transport, self.server, self.elections, self._end_round)
        self.attendance = Attendance(self.stage, self.transport, self.server, self.elections, self.mailroom.try_close)
        self.mailroom.attendance = self.attendance
        if self.elections is not None:
            self.elections.attendance = self.attendance
        degrees = [1] * setting.clients if self.server else [len(near) for near in self.near]
        self.world.check(degrees, self.model_bytes, timeout_s)
        self.handled = 0
        self.done = False
        self._batch = setting.aggregation == "batch"
        self._scored_at = -1
        self._due = setting.evaluate_every * setting.clients
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            FINISH: self._on_finish,
            DEPART: self.transport.on_depart,
            DELIVER: self.transport.on_deliver,
            FLUSH: self.transport.on_flush,
            ASK: self.mailroom.on_ask,
            CLOSE: self.mailroom.on_close,
            TIMEOUT: self._on_timeout,
            START: self._on_start,
        }
        if self.elections is not None:
            self._handlers |= {WATCH: self.elections.on_watch, SETTLE: self.elections.on_settle}

    # The run as a whole.

    @property
    def round(self) -> int:
        """How many rounds the clients have done on average, rounded down."""
        return self.ledger.rounds_done

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.stage.now

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        return self.fleet.notes

    def run(self) -> EventResult:
        """Run to the end.

        Raises RunError where nobody can go on before the end, with who waits for whom, or after `max_events` events.
        """
        if self.done:
            raise RunError("this simulation has been run; make a new one")
        while not self.done:
            self.step()
        return self.result()

    def step(self) -> dict[str, Any] | None:
        """Go on to the next evaluation, and return its row, or until the clients have done a round more on average.

        Raises RunError as `run` does.
        """
        if self.replay is not None:
            if self._elected:
                self._take_models()
            replay(self.stage, self.replay)
            self.done = True
            return self._last_row()
        if not self.handled:
            self._begin()
        stage, before = self.stage, self.ledger.rounds_done
        while not self._is_over():
            rank = self._handle_next()
            if rank == EVALUATE:
                return self._last_row()
            if self.ledger.rounds_done > before and stage.queue and stage.queue[0][0] > stage.now:
                return None
        self.done = True
        stage.now = self.until_s if self.until_s < math.inf else stage.now
        if self._scored_at == self.ledger.kinds.total():
            return None
        self._evaluate()
        return self._last_row()

    def _last_row(self) -> dict[str, Any] | None:
        return next(reversed(self.stage.metrics), None)

    def take_trace(self) -> list[Record]:
        """Hand over the records since the last call, and forget them."""
        taken = self.ledger.trace or []
        if self.ledger.trace is not None:
            self.ledger.trace = []
        return taken

    def result(self) -> EventResult:
        """Sum up what happened so far."""
        fleet, clients = self.fleet, self.setting.clients
        assignments = [state.assignment for state in fleet.states[:clients]]
        return EventResult(
            metrics=self.stage.metrics,
            banks=fleet.banks,
            assignments=torch.tensor([-1 if each is None else each for each in assignments]),
            rounds=[node.round for node in self.nodes[:clients]],
            time_s=self.ledger.time,
            idle_shares=self.ledger.idle_shares(),
            compute_s=self.ledger.busy_s(),
            staleness=dict(sorted(self.ledger.ages.items())),
            records=dict(self.ledger.kinds),
            rejected=sum(state.rejected for state in fleet.states),
            trace=self.ledger.trace,
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give everything a checkpoint needs: tensors, and facts that JSON can hold. The tensors are not copies.

        Records that nobody has taken are among the facts.
        """
        packer = Packer()
        facts = {name: part.pack(packer) for name, part in self._parts().items()}
        names = ("handled", "done", "_scored_at", "_due")
        return packer.tensors, {**facts, **{name: getattr(self, name) for name in names}}

    def restore(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from a state."""
        stored, fresh = tuple(tensors["bank"].shape), tuple(self.fleet.banks.shape)
        if stored[1:] != fresh[1:]:
            raise ConfigError(f"the checkpoint's bank is {stored}, this run's {fresh}")
        unpacker, parts = Unpacker(tensors), self._parts()
        for name, part in parts.items():
            part.restore(facts[name], unpacker)
        for name, value in facts.items():
            if name not in parts:
                setattr(self, name, value)

    def _parts(self) -> dict[str, Any]:
        parts = {"fleet": self.fleet, "stage": self.stage, "ledger": self.ledger, "transport": self.transport}
        if self.server is not None:
            parts["server"] = self.server
        if self.elections is not None:
            parts["elections"] = self.elections
        return parts

    # The clock.

    def _begin(self) -> None:
        stage, world, late = self.stage, self.world, set()
        firsts = {each.client: each.end_s for each in world.absences if each.begin_s == 0}
        for i, at_s in sorted({**{each.client: each.at_s for each in world.late_joiners}, **firsts}.items()):
            late.add(i)
            stage.note("absent", i)
            node = self.nodes[i]
            node.here = node.holds = False
            self.fleet.empty(i)
            if at_s < math.inf:
                stage.push(at_s, CHANGE, i, ("return", None))
        for each in world.absences:
            if each.begin_s > 0:
                stage.push(each.begin_s, CHANGE, each.client, ("leave", each.end_s))
        for number, partition in enumerate(world.partitions):
            stage.push(partition.begin_s, CHANGE, 0, ("split", number))
            if partition.end_s < math.inf:
                stage.push(partition.end_s, CHANGE, 0, ("heal", number))
        if self.every_s is not None:
            stage.push(self.every_s, EVALUATE, 0)
        for i in range(self.setting.clients):
            if i not in late:
                self.attendance.plan_leave(i)
                if not self._elected:
                    stage.push(0.0, START, i)
        if self._elected:
            assert self.elections is not None
            self._take_models()
            self.elections.begin()
        if self.server is not None:
            self.server.begin_round()

    def _take_models(self) -> None:
        """Leave everybody without models: they are yet to be elected."""
        for i, node in enumerate(self.nodes):
            node.holds = False
            self.fleet.bare.add(i)

    def _is_over(self) -> bool:
        """Tell whether the run has ended; raises RunError where nobody can go on."""
        stage = self.stage
        if not stage.live and (self._all_done() or not stage.changes):
            if not self._all_done():
                self._diagnose()
            return True
        return stage.queue[0][0] > self.until_s

    def _handle_next(self) -> int:
        """Handle one event; returns its kind."""
        stage = self.stage
        time, rank, _, client, epoch, payload = heapq.heappop(stage.queue)
        stage.now = time
        self.handled += 1
        if self.handled > self.max_events:
            raise RunError(
                f"stopped after max_events = {self.max_events} events, at {stage.now:g} s of virtual time and "
                f"{self.ledger.rounds_done} rounds on average; end sooner by until_s or rounds, or raise max_events"
            )
        if rank == CHANGE:
            stage.changes -= 1
            self.attendance.on_change(client, payload)
        elif rank == EVALUATE:
            self._evaluate()
            if self.every_s is not None:
                stage.push(stage.now + self.every_s, EVALUATE, 0)
        else:
            stage.live -= 1
            if epoch == self.nodes[client].epoch or rank in (DELIVER, SETTLE):
                self._handlers[rank](client, payload)
            elif rank == DEPART:
                self.transport.forget(payload[1])
        return rank

    def _all_done(self) -> bool:
        if self.server and self.nodes[SERVER].round >= self.stage.rounds:
            return True
        return all(node.done for node in self.nodes[: self.setting.clients])

    def _evaluate(self) -> None:
        self.stage.note("evaluate", SERVER)
        self.stage.score()
        self._scored_at = self.ledger.kinds.total()

    # Rounds.

    def _on_start(self, i: int, _: Any) -> None:
        node, drift = self.nodes[i], self.setting.drift
        if node.held:
            node.owes = True
            return
        if drift is not None and not self.fleet.drifted and node.round >= drift[0]:
            self.stage.note("drift", i)
            self.fleet.drift()
        node.busy = True
        if self.server and not self.stage.takes_part(i, node.round):
            self._sit(i)
            self.server.check()
            return
        self.stage.note("start", i, round=node.round)
        noise = self.world.compute.noise(self.setting.seed, i, node.round)
        self.stage.push(self.stage.now + self._round_s[i] * noise, FINISH, i)

    def _sit(self, i: int) -> None:
        node = self.nodes[i]
        node.busy = False
        self.stage.note("sit", i, round=node.round)
        self.fleet.sit(i)
        node.round += 1
        self._count_round()

    def _on_finish(self, i: int, warmed: Any) -> None:
        node, stage = self.nodes[i], self.stage
        if self.elections is not None and warmed is not None:
            self.elections.on_warm(i, warmed)
            return
        if not stage.takes_part(i, node.round):
            self._sit(i)
            self._end_round(i)
            return
        node.busy, now = False, node.round
        stage.note("finish", i, round=now)
        self.ledger.multiplications += self.fleet.work(i)
        messages = self.fleet.train(i, now)
        node.round += 1
        stage.finished(i)
        self._count_round()
        if self.fleet.silent:
            stage.go_on(i)
            return
        if self.elections is not None and self.elections.watches:
            self.elections.trained(i)
        offers = self.fleet.offers(i) if self.fleet.relays else None
        packets = [
            Packet("model", each, len(messages), made_s=stage.now, offers=offers, charter=node.charter)
            for each in messages
        ]
        if not packets:  # training diverged: say so, so that nobody waits
            packets = [Packet("nothing", stage.nothing(i, round=now), offers=offers, charter=node.charter)]
        for peer in [SERVER] if self.server else self.near[i]:
            if stage.in_reach(i, peer):
                for packet in packets:
                    self.transport.send(i, peer, packet)
        if self.server:
            if node.pending is not None:
                self.server.download(i, node.pending)
        elif self._batch:
            node.waiting = now
            if self.timeout_s is not None:
                stage.push(stage.now + self.timeout_s, TIMEOUT, i, now)
            self.mailroom.try_close(i)
        else:
            if self.fleet.relays:
                stage.push(stage.now, ASK, i)
            self.mailroom.plan_close(i)
            self._end_round(i)

    def _end_round(self, i: int) -> None:
        """Let a client go on, through an election if there is one."""
        if self.elections is not None:
            self.elections.plan_watch(i)
            self.elections.may_join(i)
        self.stage.go_on(i)

    def _count_round(self) -> None:
        if self.every_s is None and self.ledger.finished >= self._due:
            self._due += self.setting.evaluate_every * self.setting.clients
            self.stage.push(self.stage.now, EVALUATE, 0)

    def _on_timeout(self, i: int, now: int) -> None:
        node = self.nodes[i]
        if self.server and i == SERVER:
            if node.round == now:
                self.stage.note("timeout", SERVER, round=now)
                self.server.broadcast()
        elif node.waiting == now:
            self.stage.note("timeout", i, round=now)
            self.mailroom.on_close(i, None)

    # When nobody can go on.

    def _diagnose(self) -> None:
        """Raise RunError with who waits for whom."""
        waits = self.attendance.waits()
        shown = "; ".join(waits[:6]) + (f"; and {len(waits) - 6} more" if len(waits) > 6 else "")
        lost = self.ledger.kinds["lost"] + self.ledger.kinds["corrupt"]
        way_out = "give timeout_s" if self.server else 'give timeout_s, or use aggregation "sequential"'
        raise RunError(
            f"nobody can go on at {self.stage.now:g} s: {shown} ({lost} messages were lost or broken on the way); "
            f"{way_out}"
        )
