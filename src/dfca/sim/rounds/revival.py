"""By-elections (`rules.revival`) for all clients at once.

All clients warm up a model anew and vote as at the start (`election`), with the models that they hold as centres. Only
clients that raise the alarm may stand, or everybody if a cluster was lost. Everybody sees all updates at once. An
election is decided at once, on the models of its round, and takes effect LAG rounds later (`rules.surveys`).
`peer.revival` is the same for one peer: `test_a_detector_and_all_clients_at_once_watch_alike` holds the two equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import torch
from torch import Tensor

from dfca.core.rules.election import ElectionOptions
from dfca.core.rules.revival import PAUSE, ROUNDS, has_risen, is_due, is_lost, next_pause
from dfca.core.rules.surveys import LAG
from dfca.core.rules.turns import call_seats, next_slot
from dfca.peer.records.messages import Call
from dfca.sim.rounds.election import ElectionResult, ElectionSetup, Electorate

NO_ELECTION = -1


class Revival:
    """What the clients know of losses and clusters."""

    def __init__(self, clients: int, clusters: int) -> None:
        self.lowest = torch.full((clients,), float("inf"), dtype=torch.float64)  # loss per client
        self.highest = -self.lowest  # loss per client since the last election
        self.alarm = torch.zeros(clients, dtype=torch.int64)  # rounds in a row in which the loss has risen
        self.idle = torch.zeros(clusters, dtype=torch.int64)  # rounds in which nobody trained the cluster
        self.mourned = torch.zeros(clusters, dtype=torch.bool)  # lost, and an election did not fill it
        self.last = torch.tensor(-PAUSE)  # round of the last election
        self.pause = torch.tensor(PAUSE)  # rounds after it in which none is called
        self.effect = torch.tensor(NO_ELECTION)  # the round at whose end what was decided takes effect
        self.opened = torch.zeros(0, 2, dtype=torch.int64)  # what it opens: part of the graph, and cluster
        self.centres = torch.zeros(0)  # the models of these, (c, P)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""
        return {f"revival.{name}": value for name, value in vars(self).items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a state; one of an older version lacks some."""
        for name, value in vars(self).items():
            setattr(self, name, tensors.get(f"revival.{name}", value).clone())

    def watch(self, losses: Tensor, clients: Sequence[int]) -> None:
        """Look at the lowest losses (N,) that some clients assign by."""
        some, before = list(clients), self.lowest[list(clients)]
        own, high = losses[some], self.highest[some]
        high = self.highest[some] = torch.where(own.isfinite(), torch.maximum(high, own), high)
        self.alarm[some] = torch.where(has_risen(own, before, high), self.alarm[some] + 1, 0)
        self.lowest[some] = torch.minimum(before, own)

    def calls_election(
        self, assignments: Tensor, options: ElectionOptions, now: int, rounds: int, closed: Collection[int] = ()
    ) -> bool:
        """Count idle rounds, and return whether an election is called after round `now` of `rounds`; closed clusters
        cannot be lost."""
        trained = torch.bincount(assignments[assignments >= 0], minlength=len(self.idle)) > 0
        self.idle = torch.where(trained, 0, self.idle + 1)
        self.mourned &= ~trained
        self.idle[list(closed)] = 0
        if self.effect != NO_ELECTION or now + 1 + LAG >= rounds:
            return False
        alarms, waited = int((self.alarm >= ROUNDS).sum()), now - int(self.last)
        return is_due(alarms, options.support, bool(self._lost()), waited, int(self.pause))

    def decide(self, now: int, opened: Sequence[tuple[int, int, Tensor]]) -> None:
        """Keep what an election after round `now` opens, (part, cluster, model), until it takes effect."""
        self.effect = torch.tensor(now + LAG)
        self.opened = torch.tensor([place for *place, _ in opened], dtype=torch.int64).reshape(-1, 2)
        self.centres = torch.stack([model for *_, model in opened]) if opened else self.centres[:0]

    def take(self, now: int) -> list[tuple[int, int, Tensor]] | None:
        """Return what takes effect after round `now`, and forget it; None for nothing."""
        if self.effect != now:
            return None
        opened = [(part, slot, model) for (part, slot), model in zip(self.opened.tolist(), self.centres, strict=True)]
        self.effect, self.opened, self.centres = torch.tensor(NO_ELECTION), self.opened[:0], self.centres[:0]
        return opened

    def elect(
        self, setup: ElectionSetup, graph: nx.Graph, banks: Tensor, now: int, closed: Collection[int] = ()
    ) -> tuple[list[tuple[int, Tensor]], ElectionResult]:
        """Hold an election among the clients of one connected graph.

        banks (m, L, P) are those of the members of this rank. Returns the (slot, centre) that it opens, and the cost.
        """
        lost = self._lost()
        shut = sorted(set(closed) - set(lost))
        standing = {p for p, client in enumerate(sorted(graph)) if lost or self.alarm[client] >= ROUNDS}
        if not standing:
            return [], ElectionResult(banks[:0, 0], (), 0, 0)
        electorate = Electorate(setup, graph, now, Call(tuple(lost), len(banks)))
        known = [j for j in range(len(banks)) if j not in closed]
        electorate.use_banks(banks, known)
        held = electorate.hold_turns(standing, call_seats(lost, shut, len(banks), setup.options.most), len(known))
        opened: dict[int, Tensor] = {}
        for turn in held:
            if turn.record.accepted:
                opened[next_slot(lost, shut, len(banks), opened)] = turn.model
        records = tuple(turn.record for turn in held)
        scalars = electorate.cost.wave + sum(turn.scalars for turn in held)
        return list(opened.items()), ElectionResult(banks[:0, 0], records, len(held) * (len(graph) - 1), scalars)

    @property
    def unfit(self) -> set[int]:
        """The clients whose loss has risen."""
        return set(self.alarm.nonzero()[:, 0].tolist())

    def forget_lowest(self, clients: Sequence[int]) -> None:
        """Let some clients measure their lowest loss anew; the highest since the last election stays."""
        self.alarm[list(clients)] = 0
        self.lowest[list(clients)] = float("inf")

    def renumber(self, clusters: int) -> None:
        """Continue with `clusters`, all of which have followers."""
        self.idle = torch.zeros(clusters, dtype=torch.int64)
        self.mourned = torch.zeros(clusters, dtype=torch.bool)

    def close(self, now: int, clusters: int, opened: Sequence[int]) -> None:
        """End an election after which there are `clusters`; lost ones that it did not fill are given up."""
        self.last = torch.tensor(now)
        self.pause = torch.tensor(next_pause(int(self.pause), bool(opened)))
        self.forget_lowest(range(len(self.lowest)))  # also that of clients that changed
        self.highest.fill_(float("-inf"))
        self.mourned[self._lost()] = True
        grown = clusters - len(self.idle)
        self.idle = torch.cat([self.idle, torch.zeros(grown, dtype=torch.int64)])
        self.mourned = torch.cat([self.mourned, torch.zeros(grown, dtype=torch.bool)])
        self.idle[list(opened)], self.mourned[list(opened)] = 0, False

    def _lost(self) -> list[int]:
        """List the clusters that nobody trains and that no election has failed to fill yet."""
        known = enumerate(zip(self.idle.tolist(), self.mourned.tolist(), strict=True))
        return [j for j, (idle, given_up) in known if is_lost(idle, given_up)]
