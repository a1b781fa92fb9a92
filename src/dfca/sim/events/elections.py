"""Elections in virtual time: the electors of `core.elector`, their messages on real links.

**The start.** Every client warms up its own model, which takes its time. Once the share `quorum` of the clients of a
connected part of the graph that are there are ready, the election opens; a straggler neither stands nor votes, it stops
warming up, forwards what it hears, and ends with the same centres. Where more than half of the voters leave, it is held
again. A phase of the election (bid, model,
vote) is over when nothing of it travels any more and the time of an acknowledgement has passed in silence: the
simulator knows it, real nodes wait for a quiet time. Words are repeated until they arrive, so loss costs time and
nothing else.

**By-elections** (`revives`). Clients watch and call (`sim.watch`). Who hears of the call ends its round, begins no
other, and warms up; the rest is as above, and then everybody goes on. Who trained through it hears of the result and
asks the neighbour that told it for the models of the new clusters.

**Charters.** A client knows from which elections its clusters come. A partition can make two halves elect for
themselves; when they meet again, the clients of the half with fewer voters give up their models and take the others'
(`Attendance.lose_faith`), since cluster 2 here is not cluster 2 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dfca.core.elector import ElectionMessage, Elector, ElectorState
from dfca.sim.events.snapshot import Packer, Unpacker, storable
from dfca.sim.events.stage import FINISH, SETTLE, WATCH, Packet, Stage, Tag, Word
from dfca.sim.events.transport import Transport
from dfca.sim.events.watch import Call, Decree, Status, Want, Watch

if TYPE_CHECKING:
    from dfca.sim.events.attendance import Attendance

PHASES = 1000
"""An election that is not over after so many phases is closed as it stands."""


@storable
@dataclass(slots=True)
class Campaign:
    """An election that is held in one part of the graph.

    call: what called it, None for the start; rounds: by client, the round in which it joined; ready: who has warmed up;
    kept: who was ready, left and will return with its model;
    states: those that take part, once it is open, voters those that vote; settling: whether the end of a phase is
    planned; attempt: how often it had to be held again; phases: how many it has had.
    """

    members: tuple[int, ...]
    number: int
    call: Call | None = None
    rounds: dict[int, int | None] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    states: dict[int, ElectorState] = field(default_factory=dict)
    voters: set[int] = field(default_factory=set)
    opened: int = 0
    attempt: int = 0
    open: bool = False
    settling: bool = False
    phases: int = 0

    @property
    def tag(self) -> Tag:
        return self.members[0], self.number, self.attempt


class Elections:
    """All elections of a run: at most one at a time in each part of the graph."""

    attendance: Attendance

    def __init__(self, stage: Stage, transport: Transport, quorum: float, warm_s: Sequence[float]) -> None:
        self.stage, self.nodes, self.fleet, self.transport = stage, stage.nodes, stage.fleet, transport
        self.quorum, self.warm_s = quorum, warm_s
        self.options = stage.setting.algorithm.election
        self.part_of = {i: part for part in stage.parts for i in part}
        self.campaigns: dict[int, Campaign] = {}
        self.watches = [Watch() for _ in range(stage.clients)] if stage.setting.algorithm.revives else []
        transport.hushed = self.hushed

    # Before it opens.

    def begin(self) -> None:
        """Let everybody who is there warm up for the start."""
        for part in self.stage.parts:
            self.campaigns[part[0]] = Campaign(part, 0)
        for i, node in enumerate(self.nodes[: self.stage.clients]):
            if node.here:
                self._join(i)

    def of(self, i: int) -> Campaign | None:
        """Find the election that runs in a client's part of the graph."""
        return self.campaigns.get(self.part_of[i][0])

    def pending(self, i: int) -> bool:
        """Tell whether the start of a client's part is still being elected."""
        campaign = self.of(i)
        return campaign is not None and campaign.call is None

    def joins(self, i: int) -> bool:
        """Let a client that arrives without models wait for the start that is being elected, if there is one."""
        campaign = self.of(i)
        if campaign is None or campaign.call is not None:
            return False
        if i in campaign.kept and not campaign.open:
            campaign.ready.add(i)
            self._check_quorum(campaign)
        elif not campaign.open:
            self._join(i)
        return True

    def _join(self, i: int) -> None:
        """Let a client warm up for the election in its part."""
        node, campaign = self.nodes[i], self.of(i)
        assert campaign is not None
        node.warming = True
        campaign.rounds[i] = None if campaign.call is None else node.round - 1
        self.stage.note("warm", i, round=-1 if campaign.call is None else node.round - 1)
        noise = self.stage.world.compute.noise(self.stage.seed, i, -1 - campaign.number)
        self.stage.push(self.stage.now + self.warm_s[i] * noise, FINISH, i, campaign.tag)

    def on_warm(self, i: int, tag: Tag) -> None:
        """Let a client be ready."""
        node, campaign = self.nodes[i], self.of(i)
        node.warming = False
        self.stage.note("warmed", i)
        if campaign is not None and campaign.tag == tag and not campaign.open:
            campaign.ready.add(i)
            self._check_quorum(campaign)

    def _check_quorum(self, campaign: Campaign) -> None:
        here = [i for i in campaign.members if self.nodes[i].here]
        enough = len(campaign.ready) >= max(1, math.ceil(self.quorum * len(here) - 1e-9))
        if enough and not campaign.open:
            self._plan(campaign, 0.0)

    def _plan(self, campaign: Campaign, after_s: float) -> None:
        if not campaign.settling:
            campaign.settling = True
            self.stage.push(self.stage.now + after_s, SETTLE, campaign.members[0], campaign.tag)

    def left(self, i: int) -> None:
        """Go on without a client that has left."""
        campaign = self.of(i)
        if campaign is None:
            return
        if i in campaign.ready and not campaign.open and self.stage.world.churn.keeps:
            campaign.kept.add(i)
        campaign.ready.discard(i)
        campaign.states.pop(i, None)
        campaign.voters.discard(i)
        if campaign.open and 2 * len(campaign.voters) < campaign.opened:
            self._hold_again(campaign)
        self._check_quorum(campaign)

    def _hold_again(self, campaign: Campaign) -> None:
        """Close an election that too many have left; those that are left are ready for the next attempt."""
        campaign.ready, campaign.voters, campaign.states = set(campaign.voters), set(), {}
        campaign.open = campaign.settling = False
        campaign.attempt += 1
        for i in campaign.members:
            node = self.nodes[i]
            free = node.here and not (node.busy or node.warming or i in campaign.ready)
            if free and (campaign.call is None or node.held):
                self._join(i)

    # While it runs.

    def hushed(self, tag: Tag) -> None:
        """Plan the end of a phase: nothing of it travels any more."""
        campaign = self.campaigns.get(tag[0])
        if campaign is not None and campaign.tag == tag and campaign.open:
            self._plan(campaign, self.transport.retry_s)
        elif campaign is not None and campaign.tag == tag:
            self._check_quorum(campaign)

    def on_settle(self, _: int, tag: Tag) -> None:
        """Open an election, or end a phase of it for everybody."""
        campaign = self.campaigns.get(tag[0])
        if campaign is None or campaign.tag != tag:
            return
        campaign.settling = False
        if self.transport.alive[tag]:
            return  # it will be hushed again
        if not campaign.open:
            self._open_campaign(campaign)
        else:
            campaign.phases += 1
            for i in sorted(campaign.states):
                campaign.states[i], told = self._elector(i, campaign).settle(campaign.states[i])
                self._emit(i, told, tag)
        if all(s.phase == "done" for s in campaign.states.values()) or campaign.phases >= PHASES:
            self._conclude(campaign)
        elif not self.transport.alive[tag]:
            self._plan(campaign, self.transport.retry_s)

    def _open_campaign(self, campaign: Campaign) -> None:
        campaign.open, campaign.voters, campaign.opened = True, set(campaign.ready), len(campaign.ready)
        for i in campaign.members:
            node = self.nodes[i]
            if not node.here or (campaign.call is not None and not node.holds):
                continue
            if i in campaign.voters:
                own = self.fleet.warmed(i, campaign.rounds[i])
            else:
                own = self.fleet.states[i].bank[0]  # it will not be asked for
                self._stop_warming(i)
            campaign.states[i], told = self._elector(i, campaign).open(own)
            self._emit(i, told, campaign.tag)

    def _elector(self, i: int, campaign: Campaign) -> Elector:
        call, votes = campaign.call, i in campaign.voters
        if call is None:
            return self.fleet.elector(i, stands=votes, votes=votes)
        stands = votes and (bool(call.lost) or self.watches[i].alarmed)
        room = len(call.lost) + max(0, self.options.most - call.clusters)
        held = self.fleet.states[i].bank
        return self.fleet.elector(i, campaign.rounds.get(i), held=held, stands=stands, votes=votes, room=room)

    def _emit(self, i: int, told: Sequence[ElectionMessage], tag: Tag) -> None:
        for message in told:
            if hasattr(message, "to"):
                self.transport.tell(i, message.to, message, tag)
            else:
                self.transport.tell_all(i, message, tag)

    def hear(self, i: int, sender: int, word: Word) -> None:
        """Take in what a neighbour tells."""
        what = word.what
        if isinstance(what, Status):
            if self.watches[i].hear(what):
                self.transport.tell_all(i, what, but=sender)
        elif isinstance(what, Call):
            self._hear_call(i, what, sender)
        elif isinstance(what, Decree):
            self._hear_decree(i, sender, what)
        else:
            campaign = self.of(i)
            if campaign is not None and campaign.tag == word.of and i in campaign.states:
                campaign.states[i], told = self._elector(i, campaign).receive(campaign.states[i], what)
                self._emit(i, told, campaign.tag)

    # The end.

    def _conclude(self, campaign: Campaign) -> None:
        """Give everybody who took part the centres, and let it go on."""
        del self.campaigns[campaign.members[0]]
        took_part = sorted(campaign.states)
        for i in took_part:
            state, node = campaign.states[i], self.nodes[i]
            opened = state.opened
            slots = self._slots(campaign, len(opened))
            if campaign.call is None:
                first = opened[0]
                opened = (*opened, *[first] * (self._most(campaign) - len(opened)))
                slots = tuple(range(len(opened)))
            for slot, (candidate, model) in zip(slots, opened, strict=True):
                self._open(i, slot, candidate, campaign, model)
            if opened:
                entry = (state.voters, -opened[0][0], campaign.number, tuple(slots))
                node.charter = (*node.charter, entry)
            if campaign.call is None:
                node.holds = True
                self.fleet.settle(i)
                self.stage.go_on(i)
            else:
                self.watches[i].close(campaign.number, node.round - 1, self.fleet.models, slots)
                self._release(i)
                self.transport.tell_all(i, Decree(campaign.number, node.charter))
        self.fleet.forget_warmed()
        for i in campaign.members:
            node = self.nodes[i]
            if campaign.call is None and node.here and i not in campaign.states:
                self._stop_warming(i)
                node.seeking = True
        self.attendance.ask_again()

    def _most(self, campaign: Campaign) -> int:
        return max(self.fleet.models, *(len(state.chosen) for state in campaign.states.values()))

    def _slots(self, campaign: Campaign, opened: int) -> tuple[int, ...]:
        """Settle which clusters the accepted candidates open: lost ones first."""
        if campaign.call is None:
            return tuple(range(opened))
        lost, clusters = campaign.call.lost, campaign.call.clusters
        return (*lost, *range(clusters, clusters + opened))[:opened]

    def _open(self, i: int, slot: int, candidate: int, campaign: Campaign, model: Any) -> None:
        node = self.nodes[i]
        joined = campaign.rounds.get(candidate)
        self.stage.note("elect", i, candidate, slot, -1 if joined is None else joined)
        self.stage.ledger.open_cluster(slot)
        self.fleet.open_cluster(i, slot, model)
        for key in [key for key in node.mailbox if key[1] == slot]:
            del node.mailbox[key]

    def _stop_warming(self, i: int) -> None:
        node = self.nodes[i]
        if node.warming:
            node.warming = False
            node.epoch += 1
            self.stage.note("warmed", i)

    def _release(self, i: int) -> None:
        node = self.nodes[i]
        node.held = False
        if node.owes:
            node.owes = False
            self.stage.go_on(i)

    # Watching.

    def trained(self, i: int) -> None:
        """Let a client look at its loss after a round, and tell what changed."""
        state, watch = self.fleet.states[i], self.watches[i]
        watch.look(self.fleet.seen[i])
        if state.assignment is None:
            return
        status = Status(i, self.nodes[i].round - 1, state.assignment, watch.alarmed)
        before = watch.known.get(i, (0, -1, False))
        watch.hear(status)
        if before[1:] != (status.cluster, status.alarmed):
            self.transport.tell_all(i, status)

    def plan_watch(self, i: int) -> None:
        """Let a client ask itself at the end of its round whether an election is due."""
        if self.watches:
            self.stage.push(self.stage.now, WATCH, i)

    def on_watch(self, i: int, _: Any) -> None:
        """Ask whether an election is due, and call it."""
        node, watch = self.nodes[i], self.watches[i]
        now = node.round - 1
        watch.end_round(self.fleet.models)
        if node.held or node.done or self.of(i) is not None or not watch.calls(now, self.options):
            return
        self._hear_call(i, Call(watch.number + 1, now, i, watch.lost(), self.fleet.models))

    def _hear_call(self, i: int, call: Call, sender: int | None = None) -> None:
        node, watch, campaign = self.nodes[i], self.watches[i], self.of(i)
        if call.number <= watch.number or not node.holds:
            if sender is not None and call.number <= watch.closed:  # its caller missed an election
                self.transport.tell(i, sender, Decree(watch.closed, node.charter))
            return
        watch.number = call.number
        if campaign is None:
            campaign = self.campaigns[self.part_of[i][0]] = Campaign(self.part_of[i], call.number, call)
        assert campaign.call is not None
        if not campaign.open and (call.round, -call.client) > (campaign.call.round, -campaign.call.client):
            campaign.call = call
        self.transport.tell_all(i, call, campaign.tag)
        node.held = True
        if not node.busy:
            self.may_join(i)

    def may_join(self, i: int) -> None:
        """Let a client that does not train any more warm up for the election that it has heard of."""
        node, campaign = self.nodes[i], self.of(i)
        if node.held and campaign is not None and not campaign.open and not node.warming and i not in campaign.ready:
            self._join(i)
        elif node.held and campaign is None:
            self._release(i)

    def _hear_decree(self, i: int, sender: int, decree: Decree) -> None:
        """Learn of an election that one took no part in."""
        node, watch, campaign = self.nodes[i], self.watches[i], self.of(i)
        if campaign is not None and campaign.call is not None and campaign.number <= decree.number:
            self._abandon(campaign)
        if decree.number <= watch.closed or not node.holds:
            watch.number = max(watch.number, decree.number)
            return
        extra = decree.charter[len(node.charter) :]
        watch.close(decree.number, node.round - 1, self.fleet.models, tuple(j for each in extra for j in each[3]))
        self._stop_warming(i)
        self._release(i)
        self.transport.tell_all(i, decree, but=sender)
        self.compare(i, sender, decree.charter)

    def _abandon(self, campaign: Campaign) -> None:
        """Break off an election that others have held already."""
        del self.campaigns[campaign.members[0]]
        for i in campaign.members:
            if self.nodes[i].held:
                self._stop_warming(i)
                self._release(i)

    def brief(self, i: int, newcomer: int) -> None:
        """Tell a newcomer who trains what."""
        if self.watches:
            self.transport.tell(i, newcomer, Decree(self.watches[i].closed, self.nodes[i].charter))
            for client, (round, cluster, alarmed) in self.watches[i].known.items():
                self.transport.tell(i, newcomer, Status(client, round, cluster, alarmed))

    # Charters.

    def compare(self, i: int, sender: int, theirs: Any, cluster: int | None = None) -> bool:
        """See whether a neighbour's clusters are one's own; tells whether its model of a cluster may be folded.

        A client that lacks clusters asks for them; one whose clusters lost against the neighbour's gives them up.
        """
        mine = self.nodes[i].charter
        if theirs == mine:
            return True
        shorter = min(len(mine), len(theirs))
        if mine[:shorter] != theirs[:shorter]:
            if theirs > mine:
                self.attendance.lose_faith(i, sender, theirs)
            return False
        newer = {j for entry in (*mine[shorter:], *theirs[shorter:]) for j in entry[3]}
        if len(theirs) > len(mine):
            for j in sorted(newer - self.nodes[i].taken):
                if j not in self.nodes[i].wanted:
                    self.nodes[i].wanted[j] = sender
                    self.transport.tell(i, sender, Want(i, j))
        return cluster not in newer

    def adopt(self, i: int, sender: int, packet: Packet) -> bool:
        """Take the model of a cluster that was opened elsewhere; tells whether the packet is one."""
        node, cluster = self.nodes[i], packet.message.cluster
        if packet.charter[: len(node.charter)] != node.charter:
            return False
        newer = {j for entry in packet.charter[len(node.charter) :] for j in entry[3]}
        if cluster not in newer:
            return False
        node.wanted.pop(cluster, None)
        self.stage.note("adopt", i, sender, cluster, packet.message.round, packet.number)
        self.stage.ledger.open_cluster(cluster)
        self.fleet.open_cluster(i, cluster, packet.message.model)
        node.taken.add(cluster)
        if newer <= node.taken:
            node.charter = packet.charter
            node.taken.clear()
        return True

    def waits(self) -> list[str]:
        """Tell what elections wait for."""
        told = []
        for campaign in self.campaigns.values():
            here = [i for i in campaign.members if self.nodes[i].here]
            told.append(
                f"the election of client {campaign.members[0]}'s part has {len(campaign.ready)} of {len(here)} clients "
                f"ready and needs {math.ceil(self.quorum * len(here) - 1e-9)}"
            )
        return told

    def pack(self, packer: Packer) -> Any:
        """Give everything that a checkpoint needs."""
        return packer.pack({"campaigns": self.campaigns, "watches": self.watches})

    def restore(self, packed: Any, unpacker: Unpacker) -> None:
        """Continue from what `pack` gave."""
        values = unpacker.unpack(packed)
        self.campaigns, self.watches = values["campaigns"], values["watches"]
