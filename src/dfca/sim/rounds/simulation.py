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
from dfca.core.client import effective, participates, share_rule, weight_rule
from dfca.core.params import FlatModel, initial
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split
from dfca.errors import ConfigError, ModelError
from dfca.memory import explain_oom, format_bytes
from dfca.sim.bank import Bank
from dfca.sim.engine import Needs, Task, make_engine
from dfca.sim.evaluation import Evaluator, Scope
from dfca.sim.rounds.election import Outcome, elect
from dfca.sim.rounds.exchange import Exchange
from dfca.sim.rounds.revival import Revival
from dfca.sim.setting import Setting, initial_module
from dfca.sim.shards import Alone, Shards, members_of, pieces, within

PHASES = ("start", "assign", "train", "mix", "evaluate")


class Simulation:
    """A running simulation: `step` does one round; `state` and `restore` carry it over a restart, bit by bit.

    With several ranks (`sim.distributed`) each holds the banks (m, L, P), samples and losses of its `members` alone;
    assignments and everything else that is counted per client is known to all.
    """

    def __init__(self, setting: Setting, shards: Shards | None = None) -> None:
        self.setting, algorithm = setting, setting.algorithm
        self.shards: Shards = shards or Alone(setting.clients)
        self.members = self.shards.members
        device, dtype = setting.device, setting.dtype
        with self.shards.agreed():
            self.flat = FlatModel(initial_module(setting).to(dtype)).to(device)
            self.train, self.test = self._hold(setting.split)
            self._check_outputs()
            self.engine = make_engine(
                setting.engine, self.flat, effective(setting.local, algorithm), setting.seed, self.train, device
            )
        self.truth = setting.split.clusters
        self.shared = algorithm.exchange == "server"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.elections: list[Outcome] = []
        with self._timed("start"), explain_oom():
            self.banks = self._start()
        self.exchange = Exchange(
            setting.graph,
            algorithm,
            self.models,
            weight_rule(algorithm, setting.weights),
            setting.aggregation,
            share_rule(algorithm, setting.share),
            setting.seed,
            self.shards,
        )
        self.revival = Revival(setting.clients, self.models) if algorithm.revives else None
        self.evaluator = Evaluator(setting, self.engine, self.shards)
        self.evaluator.hold(setting.split, self.train, self.test)
        self.round = 0
        self.assignments = torch.full((setting.clients,), -1)
        self.changed = 0
        self.diverged: set[int] = set()
        self.start_messages = sum(outcome.models_sent for outcome in self.elections)
        self.exchange.scalars += sum(outcome.scalars_sent for outcome in self.elections)
        self._losses: Tensor | None = None

    @property
    def models(self) -> int:
        """Count the models that a client keeps."""
        return len(self.banks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        setting, found = self.setting, list(self.setting.split.notes)
        if setting.clusters is None and setting.algorithm.start == "elected":
            found.append(f"{setting.algorithm.name} opened {_count(self.models, 'cluster')}")
        elif setting.clusters is None and setting.algorithm.models == "clusters":
            found.append(f"{setting.algorithm.name} cannot find the number of clusters; it is told: {self.models}")
        if setting.algorithm.exchange == "gossip":
            if isolated := [i for i, degree in setting.graph.degree if degree == 0]:
                found.append(
                    f"{len(isolated)} of {setting.clients} clients have no neighbours (first: {isolated[0]}) "
                    "and learn alone"
                )
            if (parts := nx.number_connected_components(setting.graph)) > 1:
                found.append(f"the graph has {parts} components; models cannot pass between them")
        if self.diverged:
            found.append(
                f"training diverged at {len(self.diverged)} of {setting.clients} clients "
                f"(first: {min(self.diverged)}): updates that are not finite are undone and not sent; "
                "try a smaller local.learning_rate"
            )
        if self._bank.on_disk:
            available = self._bank.available
            room = "" if available is None else f"; {format_bytes(available)} of memory were available"
            found.append(f"the models of all clients ({format_bytes(self._bank.bytes)}) lie on the disk{room}")
        return tuple(found)

    @property
    def done(self) -> bool:
        """Tell whether all rounds are over."""
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
            senders = self._hear(present, here, means, choices, fine)
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
        """Give everything a checkpoint needs: tensors, and facts that JSON can hold. The tensors are not copies.

        With several ranks "bank" holds the rows of the members; `rows` gives those of all.
        """
        tensors, facts = self.exchange.state()
        if self.revival is not None:
            tensors = {**tensors, **self.revival.state()}
        facts = {
            **facts,
            "round": self.round,
            "changed": self.changed,
            "diverged": sorted(self.diverged),
            "start_messages": self.start_messages,
            "seconds": dict(self.seconds),
            "losses_known": self._losses is not None,
        }
        return {**tensors, "bank": self.banks, "assignments": self.assignments}, facts

    def bank_shape(self) -> tuple[int, int, int]:
        """Give the shape of the banks of all ranks together: (m, N, P), or (m, 1, P) where a server keeps one."""
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
        told = self.shards.share({"facts": facts, "shape": None if bank is None else list(bank.shape)})
        facts, stored, fresh = told["facts"], tuple(told["shape"]), self.bank_shape()
        if stored[1:] != fresh[1:] or (stored != fresh and self.revival is None):
            raise ConfigError(f"the checkpoint's bank is {stored}, this run's {fresh}")
        small = self.shards.share_tensors(small)
        if stored != fresh:
            self.banks = self._bank.open(stored[0])
        if self.shared:
            self.banks.copy_(self.shards.tell(self.banks if bank is None else bank.to(self.banks.device), 0))
        else:
            self.shards.spread_(bank, self.banks)
        self.assignments = small["assignments"].clone()
        self.exchange.restore(small, facts)
        if self.revival is not None:
            self.revival.restore(small)
        self.round, self.changed, self.diverged = facts["round"], facts["changed"], set(facts["diverged"])
        self.start_messages, self.seconds = facts["start_messages"], dict(facts["seconds"])
        if self.setting.drift is not None and self.round > self.setting.drift[0]:
            self._drift()
        # an uninterrupted run would go on with the losses of its evaluation: so does this one, bit by bit
        self._losses = self.engine.losses(self.banks, self.train) if facts["losses_known"] else None

    def _hold(self, split: Split) -> tuple[ClientData, ClientData]:
        """Take the samples of the members."""
        device, dtype = self.setting.device, self.setting.dtype
        train, test = (members_of(data, self.members).to(device, dtype) for data in (split.train, split.test))
        return train, test

    def _row(self, client: int) -> int:
        """Find a client's place in the banks."""
        if client not in self.members:
            raise ConfigError(f"client must be in {self.members.start}..{self.members.stop - 1} here, got {client}")
        return 0 if self.shared else client - self.members.start

    def _make_banks(self, models: int) -> Tensor:
        """Make room for the banks of the members, and for the clusters that may still be opened."""
        setting, algorithm = self.setting, self.setting.algorithm
        rows = 1 if self.shared else len(self.members)
        most = algorithm.election.most if algorithm.revives else models
        samples = sum(t.numel() * t.element_size() for t in (self.train.x, self.test.x))
        with self.shards.agreed():
            self._bank = Bank(
                (models, rows, self.flat.size),
                most,
                setting.dtype,
                setting.device,
                setting.bank,
                setting.bank_folder,
                samples,
                self.shards.neighbours,
            )
            return self._bank.open(models)

    def _start(self) -> Tensor:
        """Draw or elect the banks (m, N, P), or (m, 1, P) where a server keeps one for all."""
        setting, algorithm = self.setting, self.setting.algorithm
        if algorithm.start == "elected":
            return self._elect()
        clusters = setting.clusters
        if clusters is None or algorithm.informed:
            clusters = setting.true_clusters
        banks = self._make_banks(algorithm.bank_size(clusters))
        for j in range(len(banks)):
            if algorithm.start == "shared":
                banks[j] = initial(self.flat, setting.make_model, setting.seed, "init", j)
            else:
                for row, i in enumerate(range(1) if self.shared else self.members):
                    banks[j, row] = initial(self.flat, setting.make_model, setting.seed, "init", j, i)
        return banks

    def _elect(self) -> Tensor:
        """Let every connected component elect its centres; where one has fewer, its first fills the empty places."""
        setting = self.setting
        start = initial(self.flat, setting.make_model, setting.seed, "init", 0).to(setting.device)
        components = self._components()
        self.elections = [
            elect(
                self.engine,
                start,
                self.train,
                setting.graph.subgraph(part),
                setting.seed,
                setting.clusters,
                setting.algorithm.election,
                self.shards,
            )
            for part in components
        ]
        banks = self._make_banks(max(len(outcome.centres) for outcome in self.elections))
        for part, outcome in zip(components, self.elections, strict=True):
            for j, models in enumerate(banks):
                models[within(self.members, part)] = outcome.centres[j if j < len(outcome.centres) else 0]
        return banks

    def _drift(self) -> None:
        """Let the clients hold other samples from now on."""
        assert self.setting.drift is not None
        split = self.setting.drift[1]
        self.train, self.test = self._hold(split)
        self.truth = split.clusters
        self.evaluator.hold(split, self.train, self.test)
        self._losses = None

    def _revive(self, now: int) -> None:
        """Watch for lost clusters and new distributions; open the centres that an election accepts."""
        setting, revival, options = self.setting, self.revival, self.setting.algorithm.election
        assert revival is not None
        if not revival.calls_election(self.assignments, options, now):
            return
        start = initial(self.flat, setting.make_model, setting.seed, "init", 0).to(setting.device)
        slots = set()
        for part in self._components():
            graph, rows = setting.graph.subgraph(part), within(self.members, part)
            opened, cost = revival.elect(
                self.engine, start, self.train, self.banks, graph, setting.seed, options, now, self.shards
            )
            self.start_messages += cost.models_sent
            self.exchange.scalars += cost.scalars_sent
            for slot, centre in opened:
                if slot == len(self.banks):
                    self.banks = self._bank.open(slot + 1)
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
        """Let the members in the round choose and train; `here` are their places among the members.

        Returns what they chose by (C, m), their choices, and whose model is finite (C,). Where clients keep their own
        banks the trained models are written there; a server gets their mean.
        """
        seed, algorithm = self.setting.seed, self.setting.algorithm
        known, needs = self._known(here)

        def choose(position: int, means: Tensor, samples: Tensor | None) -> Choice:
            client = self.members[here[position]]
            told = self._truth(client) if algorithm.informed else None
            if samples is None and algorithm.needs == "samples":
                samples = torch.zeros(1, self.train.sizes[here[position]], device=self.banks.device)
            return algorithm.choose(View(means, partial(stream, seed, "choose", client, now), samples, told))

        choices: list[Choice] = []
        means = torch.zeros(len(here), self.models)
        found = torch.zeros(len(here), dtype=torch.bool)
        sums = torch.zeros_like(self.banks[:, 0]) if self.shared else None
        counts = torch.zeros(self.models, dtype=torch.int64)
        task = Task(self.banks, self.train, choose, now, needs, known, self.members.start, in_place=not self.shared)
        for done in self.engine.work(task, here):
            some = slice(done.positions[0], done.positions[-1] + 1)
            means[some], found[some] = done.losses.to(means), torch.tensor(done.fine)
            choices += done.choices
            self.seconds["train"] -= done.looked_s
            self.seconds["assign"] += done.looked_s
            if done.vectors is None:
                continue
            for position, choice, vector, fine in zip(
                done.positions, done.choices, done.vectors, done.fine, strict=True
            ):
                if not fine:  # an update that diverged is undone
                    continue
                if sums is None:
                    self.banks[choice.cluster, here[position]] = vector
                else:
                    sums[choice.cluster] += vector
                    counts[choice.cluster] += 1
        if sums is not None:
            sums, counts = self.shards.sum(sums), self.shards.sum(counts)
            for j, count in enumerate(counts.tolist()):
                if count:
                    self.banks[j, 0] = sums[j] / count
        return means, choices, found

    def _known(self, here: Sequence[int]) -> tuple[Tensor | None, Needs]:
        """Tell what the clients need to see of their models, and the losses that the last evaluation has left."""
        needs = self.setting.algorithm.needs
        kept, self._losses = self._losses, None
        if needs == "nothing" or (self.models == 1 and self.revival is None):
            return None, "nothing"
        return (None if kept is None or needs != "losses" else kept[list(here)]), needs

    def _hear(
        self, present: Sequence[int], here: Sequence[int], means: Tensor, choices: Sequence[Choice], fine: Tensor
    ) -> Tensor:
        """Put together what all clients of the round chose and who has a model to send, (N,) bool."""
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
        self.exchange.gossip_(self.banks, present, senders, self.assignments, now, drift)
        return [] if drift is None else drift.result(self.shards.sum).tolist()

    def _evaluate(self, scope: Scope | None = None) -> dict[str, Any]:
        """Score the state after a round."""
        scores = self.evaluator.score(self.banks, self.assignments, scope, self._losses)
        return {
            "round": self.round,
            **scores.row,
            "changed": self.changed,
            **self.exchange.traffic(self.flat.size * self.banks.element_size(), self.start_messages),
            "election": [asdict(turn) for turn in self.elections[0].turns] if self.elections else None,
        }

    def _truth(self, client: int) -> int:
        assert self.truth is not None  # Setting checked it
        return int(self.truth[client])

    def _check_outputs(self) -> None:
        """Raise ModelError unless the model maps a sample of this data to one number per class."""
        x, _ = self.train.of(0)
        vector = self.flat.flatten(initial_module(self.setting).to(self.setting.dtype)).to(self.setting.device)
        try:
            with torch.no_grad():
                outputs = self.flat.run(self.flat.pieces(vector), x[:2], "score")
        except (RuntimeError, ValueError, TypeError) as error:
            raise ModelError(f"the model cannot take samples of shape {tuple(x.shape[1:])}: {error}") from error
        classes = self.setting.split.classes
        if outputs.dim() != 2 or outputs.shape[1] < classes:
            raise ModelError(
                f"the model must give (n, {classes}) outputs for {classes} classes, got {tuple(outputs.shape)}"
            )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
