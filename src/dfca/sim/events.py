"""The asynchronous simulator: a virtual clock and an event queue drive the sans-I/O clients of `core.client`.

Each client runs its own rounds at its own pace. A round: choose and train (takes the world's compute time), send, then

  sequential   fold what came while it trained and go on at once; what comes later waits in the mailbox
  batch        wait until every neighbour in reach has sent its model of this round, or for `timeout_s`, fold, go on

With a server (ifca, fedavg, oracle) the clients upload what they trained, the server waits for all clients of the round
that are in reach, takes the mean of each cluster and sends all models to everybody: it is bound by the slowest. Its own
uplink is not shared: a client's download takes its own bandwidth.

**Order.** Events at the same instant are handled by kind: changes of the world, ends of training, departures, arrivals,
timeouts, evaluations, starts of rounds; within a kind in the order in which they were made. So models that are trained
at the same instant all meet before the next round begins, and in the ideal world this simulator computes what the
synchronous one does (a test says so, for every algorithm).

**Mailbox.** A message of an older round than the newest seen from its sender for its cluster is dropped, so duplicates
and overtaken messages do nothing. While a client trains, its mailbox keeps the newest message per sender and cluster;
under `batch`, where a neighbour can be one round ahead, the newest two. An uplink that cannot keep up drops the models
that were overtaken before they left. So memory is bounded by the banks, the graph's edges and what is on its way.

**Staleness.** A message weighs by its age in rounds: `sim.staleness`.

**Churn.** A client that leaves loses the work of its round, its mailbox and its outbox. When it returns it goes on with
the round that its neighbours are in. A client without models (a late joiner, or one that returns empty) asks all
neighbours for all their models, folds what comes as equals, and begins once each cluster has come, as a rule with the
bank of the first that answers; what was asked for is repeated until it arrives, so it suffers delays but no loss.
Neighbours know who is in reach: nobody waits for a client that is away.

Refused for now: share "relay", revival and drift. An election is held before the clock starts, free of delays.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dfca.core.client import Message
from dfca.errors import ConfigError, RunError
from dfca.sim.fleet import CHANGE, DELIVER, DEPART, EVALUATE, FINISH, START, TIMEOUT, Attendance, Fleet, Packet, Stage
from dfca.sim.network import FLOAT_BYTES, SERVER, World, draw
from dfca.sim.rounds import Setting
from dfca.sim.server import Server
from dfca.sim.staleness import Staleness, corrupted
from dfca.sim.trace import EventResult, Record, replay

MAX_EVENTS = 100_000_000
"""A run ends here at the latest: no setting may run for ever."""


class EventSimulation:
    """A simulation in virtual time: `run` until `until_s` seconds or until every client has done `rounds` rounds.

    Without either, the setting's rounds. `setting.aggregation` says sequential or batch. evaluate_every_s None:
    whenever clients have done `setting.evaluate_every` more rounds on average. trace: keep all records in the result.
    replay: the records of an earlier run of the same setting; nothing is drawn and no clock runs, the records are
    carried out, and the result is bit-identical. dry: nothing is trained, folded or scored: the clockwork alone.
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
        trace: bool = False,
        replay: Sequence[Record] | None = None,
        dry: bool = False,
        max_events: int = MAX_EVENTS,
    ) -> None:
        _check_setting(setting)
        for name, value in (("until_s", until_s), ("evaluate_every_s", evaluate_every_s)):
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{name} must be > 0 and finite, got {value}")
        if rounds is not None and rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {rounds}")
        self.setting, self.world, self.timeout_s = setting, world or World(), timeout_s
        self.until_s = math.inf if until_s is None else until_s
        self.every_s, self.max_events, self.replay = evaluate_every_s, max_events, replay
        self.fleet = Fleet(setting, staleness or Staleness(), dry)
        rounds = rounds or (setting.rounds if until_s is None else sys.maxsize)
        self.stage = Stage(setting, self.world, self.fleet, rounds, trace)
        self.ledger, self.nodes, self.near = self.stage.ledger, self.stage.nodes, self.stage.near
        self.server = Server(self.stage, self._send, timeout_s) if self.fleet.shared else None
        self.attendance = Attendance(self.stage, self._send, self.server, self._try_close)
        degrees = [1] * setting.clients if self.server else [len(near) for near in self.near]
        self.model_bytes = self.fleet.size * FLOAT_BYTES
        self.world.check(degrees, self.model_bytes, timeout_s)
        self.handled = 0
        self._batch = setting.aggregation == "batch"
        self._seed, self._faults, self._link = setting.seed, self.world.faults, self.world.link
        slowdowns = self.world.compute.slowdowns(setting.seed, setting.clients)
        steps = max(1, setting.local.steps)
        self._round_s = [self.world.compute.step_s * steps * slowdown for slowdown in slowdowns]
        self._bandwidths = self._link.bandwidths(setting.clients)
        self._scored_at = -1
        self._due = setting.evaluate_every * setting.clients

    def run(self) -> EventResult:
        """Run to the end.

        Raises RunError where nobody can go on before the end, with who waits for whom, or after `max_events` events.
        """
        if self.handled or self.ledger.kinds:
            raise RunError("this simulation has been run; make a new one")
        if self.replay is not None:
            replay(self.stage, self.replay)
        else:
            self._begin()
            self._loop()
        fleet = self.fleet
        assignments = [state.assignment for state in fleet.states[: self.setting.clients]]
        return EventResult(
            metrics=self.stage.metrics,
            banks=fleet.banks(),
            assignments=torch.tensor([-1 if each is None else each for each in assignments]),
            rounds=[node.round for node in self.nodes[: self.setting.clients]],
            time_s=self.ledger.time,
            idle_shares=self.ledger.idle_shares(),
            staleness=dict(sorted(self.ledger.ages.items())),
            records=dict(self.ledger.kinds),
            rejected=sum(state.rejected for state in fleet.states),
            trace=self.ledger.trace,
        )

    # The clock.

    def _begin(self) -> None:
        world, clients = self.world, self.setting.clients
        late = {each.client: each.at_s for each in world.late_joiners}
        for i, at_s in sorted(late.items()):
            self.stage.note("absent", i)
            node = self.nodes[i]
            node.here = node.holds = False
            self.fleet.empty(i)
            self.stage.push(at_s, CHANGE, i, "return")
        for number, partition in enumerate(world.partitions):
            self.stage.push(partition.begin_s, CHANGE, 0, ("split", number))
            if partition.end_s < math.inf:
                self.stage.push(partition.end_s, CHANGE, 0, ("heal", number))
        if self.every_s is not None:
            self.stage.push(self.every_s, EVALUATE, 0)
        for i in range(clients):
            if i not in late:
                self.attendance.plan_leave(i)
                self.stage.push(0.0, START, i)

    def _loop(self) -> None:
        handlers: dict[int, Callable[[int, Any], None]] = {
            FINISH: self._on_finish,
            DEPART: self._on_depart,
            DELIVER: self._on_deliver,
            TIMEOUT: self._on_timeout,
            START: self._on_start,
        }
        queue, nodes = self.stage.queue, self.nodes
        while True:
            if not self.stage.live and (self._all_done() or not self.stage.changes):
                if not self._all_done():
                    self._diagnose()
                break
            time, rank, _, client, epoch, payload = heapq.heappop(queue)
            if time > self.until_s:
                break
            self.stage.now = time
            self.handled += 1
            if self.handled > self.max_events:
                raise RunError(
                    f"stopped after max_events = {self.max_events} events, at {self.stage.now:g} s of virtual time and "
                    f"{self.ledger.rounds_done} rounds on average; end sooner by until_s or rounds, or raise max_events"
                )
            if rank == CHANGE:
                self.stage.changes -= 1
                self.attendance.on_change(client, payload)
            elif rank == EVALUATE:
                self._evaluate()
                if self.every_s is not None:
                    self.stage.push(self.stage.now + self.every_s, EVALUATE, 0)
            else:
                self.stage.live -= 1
                if epoch == nodes[client].epoch or rank == DELIVER:
                    handlers[rank](client, payload)
        self.stage.now = self.until_s if self.until_s < math.inf else self.stage.now
        if self._scored_at != self.ledger.kinds.total():
            self._evaluate()

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
        node = self.nodes[i]
        node.busy = True
        if self.server and not self.stage.takes_part(i, node.round):
            self._sit(i)
            self.server.check()
            return
        self.stage.note("start", i, round=node.round)
        noise = self.world.compute.noise(self._seed, i, node.round)
        self.stage.push(self.stage.now + self._round_s[i] * noise, FINISH, i)

    def _sit(self, i: int) -> None:
        node = self.nodes[i]
        node.busy = False
        self.stage.note("sit", i, round=node.round)
        self.fleet.sit(i)
        node.round += 1
        self._count_round()

    def _on_finish(self, i: int, _: Any) -> None:
        node = self.nodes[i]
        if not self.stage.takes_part(i, node.round):
            self._sit(i)
            self.stage.go_on(i)
            return
        node.busy, now = False, node.round
        self.stage.note("finish", i, round=now)
        messages = self.fleet.train(i, now)
        node.round += 1
        self._count_round()
        if self.fleet.silent:
            self.stage.go_on(i)
            return
        packets = [Packet("model", message, len(messages)) for message in messages]
        if not packets:  # training diverged: say so, so that nobody waits
            packets = [Packet("nothing", Message(i, -1, now, self.fleet.clients[i].degree, torch.empty(0)))]
        for peer in [SERVER] if self.server else self.near[i]:
            if self.stage.in_reach(i, peer):
                for packet in packets:
                    self._send(i, peer, packet)
        if self.server:
            if node.pending is not None:
                self.server.download(i, node.pending)
        elif self._batch:
            node.waiting = now
            if self.timeout_s is not None:
                self.stage.push(self.stage.now + self.timeout_s, TIMEOUT, i, now)
            self._try_close(i)
        else:
            self._fold_mailbox(i, now=sys.maxsize)
            self.stage.go_on(i)

    def _count_round(self) -> None:
        if self.every_s is None and self.ledger.finished >= self._due:
            self._due += self.setting.evaluate_every * self.setting.clients
            self.stage.push(self.stage.now, EVALUATE, 0)

    def _fold_mailbox(self, i: int, now: int) -> None:
        """Fold the newest message of each sender and cluster up to a round; keep the later ones."""
        mailbox = self.nodes[i].mailbox
        for key in sorted(mailbox):
            ready = [message for message in mailbox[key] if message.round <= now]
            if ready:
                self._fold(i, ready[-1])
                mailbox[key] = [message for message in mailbox[key] if message.round > now]
                if not mailbox[key]:
                    del mailbox[key]

    def _fold(self, i: int, message: Message) -> None:
        self.stage.note("fold", i, message.sender, message.cluster, message.round)
        self.stage.fold(i, message)

    # Batch: who waits for whom.

    def _expects(self, i: int, peer: int, now: int) -> bool:
        node, other = self.nodes[i], self.nodes[peer]
        newest, clusters, parts = node.heard.get(peer, (-1, (), 1))
        if newest > now or (newest == now and len(clusters) >= parts) or node.since.get(peer, 0) > now:
            return False
        return self.stage.in_reach(i, peer) and not other.seeking and self.stage.takes_part(peer, now)

    def _try_close(self, i: int) -> None:
        """See anew whom a waiting client waits for; end the wait if it is nobody."""
        node = self.nodes[i]
        if node.waiting is not None:
            node.missing = {peer for peer in self.near[i] if self._expects(i, peer, node.waiting)}
            if not node.missing:
                self._close(i)

    def _close(self, i: int) -> None:
        node = self.nodes[i]
        assert node.waiting is not None
        self._fold_mailbox(i, node.waiting)
        node.waiting = None
        self.stage.go_on(i)

    def _on_timeout(self, i: int, now: int) -> None:
        node = self.nodes[i]
        if self.server and i == SERVER:
            if node.round == now:
                self.stage.note("timeout", SERVER, round=now)
                self.server.broadcast()
        elif node.waiting == now:
            self.stage.note("timeout", i, round=now)
            self._close(i)

    # Messages.

    def _send(self, i: int, peer: int, packet: Packet) -> None:
        """Hand a packet to the uplink, behind what waits there; it replaces an older model to the same peer."""
        message, node, asked = packet.message, self.nodes[i], packet.kind == "answer"
        node.sent += 1
        packet = Packet(packet.kind, message, packet.parts, packet.bank, node.sent)
        if asked:
            self.stage.note("answer", i, peer, message.cluster, message.round, packet.number)
        if packet.kind == "nothing" or i == SERVER or self._bandwidths[i] == math.inf:
            self._travel(i, peer, packet)
            return
        key = (peer, message.cluster + (self.fleet.models if asked else 0))
        if key in node.outbox:
            overtaken = node.outbox[key].message
            self.stage.note("drop", i, peer, overtaken.cluster, overtaken.round)
        self.stage.note("queue", i, peer, message.cluster, message.round)
        node.outbox[key] = packet
        if not node.sending:
            self._next_departure(i)

    def _next_departure(self, i: int) -> None:
        node = self.nodes[i]
        node.sending = bool(node.outbox)
        if node.sending:
            peer, _ = key = next(iter(node.outbox))
            packet = node.outbox.pop(key)
            self.stage.push(self.stage.now + self.model_bytes / self._bandwidths[i], DEPART, i, (peer, packet))

    def _on_depart(self, i: int, payload: tuple[int, Packet]) -> None:
        self._travel(i, *payload)
        self._next_departure(i)

    def _travel(self, i: int, peer: int, packet: Packet) -> None:
        """Put a packet on its way, through what the world does to it."""
        seed, number, faults = self._seed, packet.number, self._faults
        if packet.kind != "answer":
            self.stage.note("send", i, peer, packet.message.cluster, packet.message.round)
        delay = self._link.latency(seed, i, peer, number)
        if i == SERVER:
            delay += self.fleet.models * self.model_bytes / self._bandwidths[peer]
        safe = packet.kind == "answer"
        if not safe and faults.loss and draw(seed, "loss", i, peer, number) < faults.loss:
            self.stage.note("lost", peer, i, packet.message.cluster, packet.message.round)
            return
        if not safe and faults.duplication and draw(seed, "duplication", i, peer, number) < faults.duplication:
            later = self._link.latency(seed, i, peer, -number)
            self.stage.push(self.stage.now + later, DELIVER, peer, (i, packet))
        self.stage.push(self.stage.now + delay, DELIVER, peer, (i, packet))

    def _on_deliver(self, i: int, payload: tuple[int, Packet]) -> None:
        sender, packet = payload
        message, node = packet.message, self.nodes[i]
        if not self.stage.in_reach(i, sender):
            self.stage.note("lost", i, sender, message.cluster, message.round)
            node.asked.discard(sender)
        elif packet.kind == "answer":
            self.attendance.take(i, sender, packet)
        elif packet.kind != "nothing" and self._is_corrupt(i, sender, packet):
            self.stage.note("corrupt", i, sender, message.cluster, message.round)
            if packet.bank is None and not self.fleet.dry:
                self.fleet.fold(i, corrupted(message, self._seed, i), 0)
        elif self.server and packet.kind == "bank":
            if node.busy:
                node.pending = packet
            else:
                self.server.download(i, packet)
        elif self.server:
            self.server.upload(sender, packet)
        else:
            self._receive(i, sender, packet)

    def _is_corrupt(self, i: int, sender: int, packet: Packet) -> bool:
        share = self._faults.corruption
        return bool(share) and draw(self._seed, "corruption", sender, i, packet.number) < share

    def _receive(self, i: int, sender: int, packet: Packet) -> None:
        """Take in a neighbour's model: fold it, keep it for later, or drop it."""
        message, node = packet.message, self.nodes[i]
        j, round = message.cluster, message.round
        if node.seeking or round <= node.newest.get((sender, j), -1) or not self.stage.takes_part(i, round):
            self.stage.note("drop", i, sender, j, round)
            return
        node.newest[sender, j] = round
        if packet.kind == "nothing":
            self.stage.note("nothing", i, sender, j, round)
        elif node.busy or self._batch:
            self.stage.note("hold", i, sender, j, round)
            kept = node.mailbox.setdefault((sender, j), [])
            kept.append(message)
            if len(kept) > (2 if self._batch else 1):
                del kept[0]
        else:
            self._fold(i, message)
        if self._batch:
            newest, clusters, _ = node.heard.get(sender, (-1, set(), 1))
            if round > newest:
                node.heard[sender] = (round, {j}, packet.parts)
            elif round == newest:
                clusters.add(j)
            if node.waiting is not None and sender in node.missing and not self._expects(i, sender, node.waiting):
                node.missing.discard(sender)
                if not node.missing:
                    self._close(i)

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


def _check_setting(setting: Setting) -> None:
    """Raise ConfigError for what does not run in virtual time yet."""
    algorithm = setting.algorithm
    if "relay" in (algorithm.share, setting.share) and algorithm.exchange == "gossip":
        raise ConfigError(
            f'{algorithm.name} with share "relay" cannot run in virtual time yet; use share "trained" or "all", '
            'or algorithm "dfca-fi"'
        )
    if algorithm.revives:
        raise ConfigError(
            f'{algorithm.name} opens clusters while it runs, which virtual time cannot yet; use "dfca-fi"'
        )
    if setting.drift is not None:
        raise ConfigError("a drift cannot happen in virtual time yet; leave it out")
