"""The synchronous simulator: all clients of a round at once, on stacked banks.

One round is Algorithm 1 of the paper for every client: assign, train, exchange. `core.client` says what one client
does; this file does the same for N of them with closed forms and batched calls. A test says so for every algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from dfca import metrics
from dfca.core.algorithm import Choice, View
from dfca.core.client import participates
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.errors import ConfigError
from dfca.memory import explain_oom
from dfca.sim.engine import Needs, Task, TrainedChunk
from dfca.sim.evaluation import Evaluator, Scope
from dfca.sim.notes import notes_of
from dfca.sim.rounds.election import ElectionResult, ElectionSetup, elect
from dfca.sim.rounds.exchange import Exchange, Sent
from dfca.sim.rounds.revival import Revival
from dfca.sim.setting import Setting
from dfca.sim.shards import Shards, pieces, within
from dfca.sim.start import Start
from dfca.sim.traffic import Traffic

PHASES = ("start", "assign", "train", "mix", "evaluate")


class Simulation:
    """A running simulation: `step` does one round; `state` and `restore` carry it over a restart, bit by bit.

    With several ranks (`sim.rounds.ranks`) each holds the banks (m, L, P), samples and losses of its `members` alone;
    assignments and everything else that is counted per client is known to all.
    """

    def __init__(self, setting: Setting, shards: Shards | None = None) -> None:
        self.setting = setting
        self.start = Start(setting, shards)
        self.shards, self.members, self.shared = self.start.shards, self.start.members, self.start.shared
        self.flat, self.engine = self.start.flat, self.start.engine
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.elections: list[ElectionResult] = []
        with self._timed("start"), explain_oom():
            self.banks = self._make_banks()
        self.exchange = Exchange(setting, self.models, self.shards)
        self.traffic.start_messages = sum(result.models_sent for result in self.elections)
        self.traffic.scalars = sum(result.scalars_sent for result in self.elections)
        self.revival = Revival(setting.clients, self.models) if setting.algorithm.revives else None
        self.evaluator = Evaluator(self.start)
        self.round = 0
        self.assignments = torch.full((setting.clients,), -1)
        self.changed = 0
        self.diverged: set[int] = set()
        self._losses: Tensor | None = None

    @property
    def train(self) -> ClientData:
        """The training samples of the members."""
        return self.start.train

    @property
    def test(self) -> ClientData:
        """The test samples of the members."""
        return self.start.test

    @property
    def traffic(self) -> Traffic:
        """What was sent so far."""
        return self.exchange.traffic

    @property
    def models(self) -> int:
        """Count the models that a client keeps."""
        return len(self.banks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        return notes_of(self.start, self.evaluator, self.models, self.diverged)

    @property
    def done(self) -> bool:
        """Return whether all rounds are over."""
        return self.round >= self.setting.rounds

    def bank(self, client: int) -> Tensor:
        """Copy the models that a client holds: (m, P)."""
        return self.banks[:, self._row(client)].clone()

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module from a model of a client; without a cluster, the one that it trains."""
        chosen = max(0, int(self.assignments[client])) if cluster is None else cluster
        if not 0 <= chosen < self.models:
            raise ConfigError(f"cluster must be in 0..{self.models - 1}, got {chosen}")
        return self.flat.to_module(self.banks[chosen, self._row(client)])

    def step(self) -> dict[str, Any] | None:
        """Do one round; returns the metrics where the round is evaluated.

        Raises ShortOfMemory, and whatever `Shards` raises where another rank is lost.
        """
        with explain_oom():
            return self._step()

    def _step(self) -> dict[str, Any] | None:
        setting, now = self.setting, self.round
        if setting.drift is not None and now == setting.drift[0]:
            self._drift()
        present = [i for i in range(setting.clients) if participates(setting.seed, i, now, setting.participation)]
        here = within(self.members, present)
        due = (now + 1) % setting.evaluate_every == 0 or now + 1 == setting.rounds
        with self._timed("train"):
            means, choices, fine = self._work(here, now)
            senders = self._gather(present, here, means, choices, fine)
        with self._timed("mix"):
            moved = self._exchange(present, senders, now, measure=due)
        if self.revival is not None:
            with self._timed("start"):
                self._revive(now)
        self.round = now + 1
        if not due:
            return None
        final = now + 1 == setting.rounds
        if setting.algorithm.needs == "losses":
            with self._timed("evaluate" if final else "assign"):  # the next round assigns by the same losses
                self._losses = self.engine.losses(self.banks, self.train)
        with self._timed("evaluate"):
            found = self._evaluate(self.evaluator.scope(self.models, final))
        return {**found, "mixing_drift": moved, "seconds": dict(self.seconds)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything a checkpoint needs: tensors, and facts that JSON can hold. The tensors are not copies.

        With several ranks "bank" holds the rows of the members; `rows` yields those of all.
        """
        tensors, facts = self.exchange.state()
        if self.revival is not None:
            tensors = {**tensors, **self.revival.state()}
        return {**tensors, "bank": self.banks, "assignments": self.assignments}, {
            **facts,
            "round": self.round,
            "changed": self.changed,
            "diverged": sorted(self.diverged),
            "high_losses": sorted(self.evaluator.high_losses),
            "highest_loss": str(self.evaluator.highest_loss),  # JSON has no infinity
            "seconds": dict(self.seconds),
            "losses_known": self._losses is not None,
        }

    def bank_shape(self) -> tuple[int, int, int]:
        """Return the shape of the banks of all ranks together: (m, N, P), or (m, 1, P) where a server keeps one."""
        return self.models, 1 if self.shared else self.setting.clients, self.flat.size

    def rows(self) -> Iterator[Tensor]:
        """Yield the banks of all ranks, `bank_shape`, as runs of rows in order; on the first rank alone."""
        if not self.shared:
            return self.shards.collect(self.banks)
        return pieces(self.banks) if self.shards.rank == 0 else iter(())

    def restore(self, tensors: Mapping[str, Tensor] | None, facts: dict[str, Any] | None) -> None:
        """Continue from a state; with several ranks the first one has it and the others pass None."""
        bank = tensors["bank"] if tensors else None
        small = {name: tensor for name, tensor in tensors.items() if name != "bank"} if tensors else None
        shared = self.shards.share({"facts": facts, "shape": None if bank is None else list(bank.shape)})
        facts = shared["facts"]
        assert facts is not None  # the first rank has them
        self._restore_banks(bank, tuple(shared["shape"]))
        small = self.shards.share_tensors(small)
        self.assignments = small["assignments"].clone()
        self.exchange.restore(small, facts)
        if self.revival is not None:
            self.revival.restore(small)
        self.round, self.changed, self.diverged = facts["round"], facts["changed"], set(facts["diverged"])
        self.seconds = dict(facts["seconds"])
        self.evaluator.high_losses = set(facts.get("high_losses", ()))  # since version 0.2
        self.evaluator.highest_loss = float(facts.get("highest_loss", 0.0))
        if self.setting.drift is not None and self.round > self.setting.drift[0]:
            self._drift()
        # an uninterrupted run would go on with the losses of its evaluation: so does this one, bit by bit
        self._losses = self.engine.losses(self.banks, self.train) if facts["losses_known"] else None

    def _restore_banks(self, bank: Tensor | None, stored: tuple[int, ...]) -> None:
        """Copy the banks of a checkpoint, of that shape, which the first rank has."""
        fresh = self.bank_shape()
        if stored[1:] != fresh[1:] or (stored != fresh and self.revival is None):
            raise ConfigError(f"the checkpoint's bank is {stored}, this run's {fresh}")
        if stored != fresh:
            self.banks = self._open(stored[0])
        if self.shared:
            self.banks.copy_(self.shards.broadcast(self.banks if bank is None else bank.to(self.banks.device), 0))
        else:
            self.shards.spread_(bank, self.banks)

    def _row(self, client: int) -> int:
        """Return a client's row in the banks."""
        if client not in self.members:
            raise ConfigError(f"client must be in {self.members.start}..{self.members.stop - 1} here, got {client}")
        return 0 if self.shared else client - self.members.start

    def _make_banks(self) -> Tensor:
        """Draw or elect the banks (m, L, P), or (m, 1, P) where a server keeps one for all."""
        algorithm = self.setting.algorithm
        most = algorithm.election.most if algorithm.revives else None
        if algorithm.start != "elected":
            return self.start.draw_banks(self.start.drawn_models(), most)
        components, setup = self._components(), self._election_setup()
        self.elections = [elect(setup, self.setting.graph.subgraph(part), self.setting.clusters) for part in components]
        banks = self.start.make_banks(max(len(result.centres) for result in self.elections), most)
        for part, result in zip(components, self.elections, strict=True):
            for j, models in enumerate(banks):  # where a component has fewer centres, its first fills the empty places
                models[within(self.members, part)] = result.centres[j if j < len(result.centres) else 0]
        return banks

    def _open(self, models: int) -> Tensor:
        assert self.start.storage is not None
        return self.start.storage.open(models)

    def _election_setup(self) -> ElectionSetup:
        setting, start = self.setting, self.start
        options = setting.algorithm.election
        return ElectionSetup(self.engine, start.initial_model(), start.train, setting.seed, options, self.shards)

    def _drift(self) -> None:
        """Replace the samples of all clients by those of the later split."""
        assert self.setting.drift is not None
        split = self.setting.drift[1]
        self.start.use_split(split)
        self.evaluator.use_split(split)
        self._losses = None

    def _revive(self, now: int) -> None:
        """Watch for lost clusters and new distributions; open the centres that an election accepts."""
        revival, graph = self.revival, self.setting.graph
        assert revival is not None
        if not revival.calls_election(self.assignments, self.setting.algorithm.election, now):
            return
        setup, slots = self._election_setup(), set()
        for part in self._components():
            rows = within(self.members, part)
            opened, cost = revival.elect(setup, graph.subgraph(part), self.banks, now)
            self.traffic.start_messages += cost.models_sent
            self.traffic.scalars += cost.scalars_sent
            for slot, centre in opened:
                if slot == len(self.banks):
                    self.banks = self._open(slot + 1)
                    self.banks[slot] = self.banks[0]  # elsewhere a twin that no one picks
                self.banks[slot, rows] = centre
                slots.add(slot)
        for slot in sorted(slots):
            self.exchange.open_cluster_(slot)
        revival.close(now, len(self.banks), sorted(slots))
        self._losses = None

    def _components(self) -> list[list[int]]:
        return sorted(sorted(part) for part in nx.connected_components(self.setting.graph))

    def _work(self, here: Sequence[int], now: int) -> tuple[Tensor, list[Choice], Tensor]:
        """Choose and train for the members in the round; `here` are their places among the members.

        Returns what they chose by (C, m), their choices, and whose model is finite (C,). Where clients keep their own
        banks the trained models are written there; a server gets their mean.
        """
        known, needs = self._known(here)
        choices: list[Choice] = []
        means = torch.zeros(len(here), self.models)
        found = torch.zeros(len(here), dtype=torch.bool)
        sums = torch.zeros_like(self.banks[:, 0]) if self.shared else None
        counts = torch.zeros(self.models, dtype=torch.int64)
        choose = partial(self._choose, here, now)
        task = Task(self.banks, self.train, choose, now, needs, known, self.members.start, in_place=not self.shared)
        for done in self.engine.work(task, here):
            some = slice(done.positions[0], done.positions[-1] + 1)
            means[some], found[some] = done.losses.to(means), torch.tensor(done.fine)
            choices += done.choices
            self.seconds["train"] -= done.looked_s
            self.seconds["assign"] += done.looked_s
            self._store(done, here, sums, counts)
        if sums is not None:
            sums, counts = self.shards.sum(sums), self.shards.sum(counts)
            for j, count in enumerate(counts.tolist()):
                if count:
                    self.banks[j, 0] = sums[j] / count
        return means, choices, found

    def _choose(self, here: Sequence[int], now: int, position: int, means: Tensor, samples: Tensor | None) -> Choice:
        """Choose the model that the member at a place of `here` trains."""
        algorithm, client = self.setting.algorithm, self.members[here[position]]
        truth = None
        if algorithm.informed:
            assert self.start.truth is not None  # Setting checked it
            truth = int(self.start.truth[client])
        if samples is None and algorithm.needs == "samples":
            samples = torch.zeros(1, self.train.sizes[here[position]], device=self.banks.device)
        return algorithm.choose(View(means, partial(stream, self.setting.seed, "choose", client, now), samples, truth))

    def _store(self, done: TrainedChunk, here: Sequence[int], sums: Tensor | None, counts: Tensor) -> None:
        """Write trained models to the banks, or add them to a server's sums; an update that diverged is undone."""
        if done.vectors is None:
            return
        for position, choice, vector, fine in zip(done.positions, done.choices, done.vectors, done.fine, strict=True):
            if not fine:
                continue
            if sums is None:
                self.banks[choice.cluster, here[position]] = vector
            else:
                sums[choice.cluster] += vector
                counts[choice.cluster] += 1

    def _known(self, here: Sequence[int]) -> tuple[Tensor | None, Needs]:
        """Return the losses that the last evaluation has left, and what the clients need to see of their models."""
        needs = self.setting.algorithm.needs
        kept, self._losses = self._losses, None
        if needs == "nothing" or (self.models == 1 and self.revival is None):
            return None, "nothing"
        return (None if kept is None or needs != "losses" else kept[list(here)]), needs

    def _gather(
        self, present: Sequence[int], here: Sequence[int], means: Tensor, choices: Sequence[Choice], fine: Tensor
    ) -> Tensor:
        """Gather what all clients of the round chose, and who has a model to send, (N,) bool."""
        mine = torch.zeros(len(self.members), 3, dtype=torch.float64)
        mine[here, 0] = torch.tensor([choice.cluster for choice in choices], dtype=torch.float64)
        mine[here, 1] = fine.double()
        if self.revival is not None:
            mine[here, 2] = means.cpu().double().nan_to_num(nan=float("inf")).min(dim=1).values
        chosen, sent, lowest_losses = self.shards.gather(mine).T
        if self.revival is not None:
            self.revival.watch(lowest_losses, present)
        before, after = self.assignments[present], chosen[present].long()
        self.changed = int(((before != after) & (before >= 0)).sum())
        self.assignments[present] = after
        self.diverged |= {i for i in present if not sent[i]}
        senders: Tensor = sent > 0
        return senders

    def _exchange(self, present: Sequence[int], senders: Tensor, now: int, measure: bool) -> list[float]:
        """Send and mix; returns how far the averages drifted by it, if measured."""
        kind = self.setting.algorithm.exchange
        if kind == "server":
            self.exchange.upload(present, senders, self.assignments)
        if kind != "gossip":
            return [0.0] * self.models if measure else []
        drift = metrics.Drift(self.banks, self.setting.clients) if measure else None
        self.exchange.gossip_(self.banks, Sent.of(present, senders, self.assignments, now), drift)
        return [] if drift is None else drift.result(self.shards.sum).tolist()

    def _evaluate(self, scope: Scope | None = None) -> dict[str, Any]:
        """Score the state after a round."""
        scores = self.evaluator.score(self.banks, self.assignments, scope, self._losses)
        return {
            "round": self.round,
            **scores.row,
            "changed": self.changed,
            **self.traffic.row(self.flat.size * self.banks.element_size()),
            "election": [asdict(turn) for turn in self.elections[0].turns] if self.elections else None,
        }

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin
