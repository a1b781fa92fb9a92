"""The synchronous simulator: all clients of a round at once, on stacked banks.

One round is Algorithm 1 of the paper for every client: assign, train, exchange. `core.client` says what one client
does; this file does the same for N of them with closed forms and batched calls. A test says so for every algorithm.
"""

from __future__ import annotations

import math
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
from dfca.base.accountant import epsilon
from dfca.base.errors import ConfigError
from dfca.base.memory import explain_oom
from dfca.core.algorithm import Choice
from dfca.core.client import participates
from dfca.core.exchange import is_quiet
from dfca.core.privacy import protect, simulated_noise
from dfca.core.rules.merging import Plan, merge_
from dfca.core.rules.turns import unasked
from dfca.data.clients import ClientData
from dfca.sim.evaluation import Evaluator, Scope
from dfca.sim.local.engine import LocalTask, Needs, TrainedChunk
from dfca.sim.local.planned import quiet, work
from dfca.sim.metrics_table import EvaluationRow, JsonObject
from dfca.sim.notes import notes_of
from dfca.sim.personal import LastSteps
from dfca.sim.rounds.election import ElectionResult, ElectionSetup, elect
from dfca.sim.rounds.exchange import Exchange, Sent
from dfca.sim.rounds.merging import SurveyRounds
from dfca.sim.rounds.revival import Revival
from dfca.sim.rounds.selection import Selection
from dfca.sim.setting import Setting, hold_out_until
from dfca.sim.shards import Shards, pieces, within
from dfca.sim.start import Start
from dfca.sim.traffic import Traffic

PHASES = ("start", "assign", "train", "mix", "evaluate")


class Simulation:
    """A running simulation: `step` does one round; `state` and `restore` carry it over a restart, bit by bit.

    With several ranks (`sim.rounds.ranks`) a rank holds the banks (m, L, P), samples and losses of its `members` alone;
    assignments and everything else that is counted per client is known to all.

    Example:
        >>> import dfca
        >>> from dfca.contracts import make_setting
        >>> simulation = dfca.Simulation(make_setting(dfca.ALGORITHMS["ifca"](), rounds=2))
        >>> simulation.step(), round(simulation.step()["accuracy"], 2), simulation.done
        (None, ..., True)
    """

    def __init__(self, setting: Setting, shards: Shards | None = None) -> None:
        self.setting = setting
        self.hold_until = hold_out_until(setting)
        self.start = Start(setting, shards, hold_out=self.hold_until is not None or setting.merging is not None)
        self.last_step = LastSteps(self.start, setting.rounds)
        self.shards, self.members, self.shared = self.start.shards, self.start.members, self.start.shared
        self.flat, self.engine = self.start.flat, self.start.engine
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.elections: list[ElectionResult] = []
        self.merging: SurveyRounds | None = None
        with self._timed("start"), explain_oom():
            self.banks = self._make_banks()
        self.exchange = Exchange(setting, self.models, self.shards, self.start.layout, self.start.liars)
        choice = setting.algorithm.peers
        self.selection = None if choice is None else Selection(self.start, choice)
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
    def epsilon(self) -> float:
        """What the rounds so far have cost a client that took part in all of them; 0 without privacy."""
        privacy = self.setting.privacy
        return 0.0 if privacy is None else epsilon(privacy.noise, self.round, privacy.delta)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        if self.merging is None:
            return notes_of(self.start, self.evaluator, self.models, self.diverged)
        opened, left = max(len(result.centres) for result in self.elections), self.models if self.merging.over else 0
        return notes_of(self.start, self.evaluator, opened, self.diverged, left)

    @property
    def done(self) -> bool:
        """Return whether all rounds are over."""
        return self.round >= self.setting.rounds

    def bank(self, client: int) -> Tensor:
        """Copy the models of a client.

        Args:
            client: The number of the client.

        Returns:
            The models, (m, P).

        Raises:
            ConfigError: If the client is not a member.
        """
        return self.banks[:, self._row(client)].clone()

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module from a model of a client.

        Args:
            client: The number of the client.
            cluster: Which of its models; None: the one that it trains.

        Returns:
            A new module.

        Raises:
            ConfigError: If there is no such client or cluster.
        """
        chosen = max(0, int(self.assignments[client])) if cluster is None else cluster
        if not 0 <= chosen < self.models:
            raise ConfigError(f"cluster must be in 0..{self.models - 1}, got {chosen}")
        return self.flat.to_module(self.banks[chosen, self._row(client)])

    def personal_model(self, client: int) -> nn.Module:
        """Make the module that a client deploys after the last round: with its personal last step, if it takes one.

        Args:
            client: The number of the client.

        Returns:
            A new module.

        Raises:
            ConfigError: If the client is not a member.
        """
        place = client - self.members.start
        self._row(client)  # raises for a client of another rank
        deployed = self.evaluator.deploy(self.banks, self._known_losses())[2]([place])
        return self.flat.to_module(self.last_step.take(deployed, [place])[0])

    @explain_oom()
    def step(self) -> EvaluationRow | None:
        """Do one round.

        Returns:
            The metrics where the round is evaluated, else None.

        Raises:
            ShortOfMemory: If the memory does not suffice.
            RankLost: If another rank is lost.
        """
        setting, now = self.setting, self.round
        if setting.drift is not None and now == setting.drift[0]:
            self._drift()
        if now == self.last_step.release:
            with self._timed("start"):
                self._pick_last_step()
        present = [i for i in range(setting.clients) if participates(setting.seed, i, now, setting.participation)]
        here = within(self.members, present)
        due = (now + 1) % setting.evaluate_every == 0 or now + 1 == setting.rounds
        with self._timed("train"):
            before = self.banks[0].clone() if self.exchange.weights == "push" else None
            means, choices, fine = self._work(here, now)
            if before is not None:
                self.exchange.rescale_(self.banks, before)
            senders = self._gather(present, here, means, choices, fine)
        with self._timed("mix"):
            moved = self._exchange(present, senders, now, measure=due)
        with self._timed("start"):
            self._change_clusters(now)
        if now == self.last_step.release:
            self._hold_out(now + 1)
            self._losses = None
        self.round = now + 1
        if not due:
            return None
        final = now + 1 == setting.rounds
        if setting.algorithm.needs == "losses":
            with self._timed("evaluate" if final else "assign"):  # the next round assigns by the same losses
                self._losses = self._all_losses()
        with self._timed("evaluate"):
            row = self._evaluate(self.evaluator.scope(self.models, final))
        return EvaluationRow.of({**row, "mixing_drift": moved, "seconds": dict(self.seconds)})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect everything that a checkpoint needs.

        Returns:
            Tensors, which are not copies, and facts that JSON can hold. With several ranks "bank" holds the rows of
            the members; `rows` yields those of all.
        """
        tensors, facts = self.exchange.state()
        if self.revival is not None:
            tensors = {**tensors, **self.revival.state()}
        if self.merging is not None:
            tensors = {**tensors, **self.merging.state()}
        if self.start.memory is not None:
            tensors = {**tensors, "memory": self.start.memory}
        tensors = {**tensors, **self.engine.kept.tensors()}
        return {**tensors, **self.last_step.state(), "bank": self.banks, "assignments": self.assignments}, {
            **facts,
            "round": self.round,
            "changed": self.changed,
            "diverged": sorted(self.diverged),
            "high_losses": sorted(self.evaluator.high_losses),
            "highest_loss": str(self.evaluator.highest_loss),  # JSON has no infinity
            "seconds": dict(self.seconds),
            "losses_known": self._losses is not None,
            **({} if self.merging is None else self.merging.facts()),
            **({} if self.selection is None else {"chosen": self.selection.chosen, "alike": self.selection.alike}),
        }

    def bank_shape(self) -> tuple[int, int, int]:
        """Return the shape of the banks of all ranks together.

        Returns:
            (m, N, P), or (m, 1, P) where a server keeps one bank for all.
        """
        return self.models, 1 if self.shared else self.setting.clients, self.flat.size

    def rows(self) -> Iterator[Tensor]:
        """Read the banks of all ranks.

        Returns:
            On the first rank the banks, `bank_shape`, as runs of rows in order; on the others nothing.
        """
        if not self.shared:
            return self.shards.collect(self.banks)
        return pieces(self.banks) if self.shards.rank == 0 else iter(())

    def restore(self, tensors: Mapping[str, Tensor] | None, facts: dict[str, Any] | None) -> None:
        """Continue from a state; with several ranks the first one has it and the others pass None.

        Args:
            tensors: The tensors of `state`.
            facts: The facts of `state`.

        Raises:
            ConfigError: If the state is of another simulation.
        """
        bank = tensors["bank"] if tensors else None
        small = {name: tensor for name, tensor in tensors.items() if name != "bank"} if tensors else None
        shared = self.shards.share({"facts": facts, "shape": None if bank is None else list(bank.shape)})
        facts = shared["facts"]
        assert facts is not None  # the first rank has them
        self._restore_banks(bank, tuple(shared["shape"]))
        small = self.shards.share_tensors(small)
        if self.merging is None and "merging.closed" in small:
            self.setting.check_opened(len(small["merging.closed"]))
        self.assignments = small["assignments"].clone()
        self.exchange.restore(small, facts)
        if self.revival is not None:
            self.revival.restore(small)
        self.last_step.restore(small)
        self.engine.kept.restore(small)
        if self.merging is not None:
            self.merging.restore(small, facts)
        if self.start.memory is not None:
            self.start.memory = small["memory"].clone()
        if self.selection is not None:
            self.selection.chosen, self.selection.alike = facts["chosen"], facts["alike"]
        self.round, self.changed, self.diverged = facts["round"], facts["changed"], set(facts["diverged"])
        self.seconds = dict(facts["seconds"])
        self.evaluator.high_losses = set(facts.get("high_losses", ()))  # since version 0.2
        self.evaluator.highest_loss = float(facts.get("highest_loss", 0.0))
        if self.setting.drift is not None and self.round > self.setting.drift[0]:
            self._drift()
        self._hold_out(self.round)
        # an uninterrupted run would continue with the losses of its evaluation: so does this one, bit by bit
        self._losses = self._all_losses() if facts["losses_known"] else None

    def _restore_banks(self, bank: Tensor | None, stored: tuple[int, ...]) -> None:
        """Copy the banks of a checkpoint, of that shape, which the first rank has."""
        fresh = self.bank_shape()
        if stored[1:] != fresh[1:] or (stored != fresh and self.revival is None and self.merging is None):
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
        components, setup, merging = self._components(), self._election_setup(), self.setting.merging
        graphs = [self.setting.graph.subgraph(part) for part in components]
        clusters = self.setting.clusters
        self.elections = [elect(setup, graph, clusters, unasked(merging, len(graph))) for graph in graphs]
        centres = [len(result.centres) for result in self.elections]
        if merging is not None:
            self.merging = SurveyRounds(self.start, merging, components, centres)
            self._hold_out(0)
        banks = self.start.make_banks(max(centres), most)
        for part, result in zip(components, self.elections, strict=True):
            for j, models in enumerate(banks):  # where a component has fewer centres, its first fills the empty places
                models[within(self.members, part)] = result.centres[j if j < len(result.centres) else 0]
        return banks

    def _open(self, models: int) -> Tensor:
        assert self.start.storage is not None
        return self.start.storage.open(models)

    def _election_setup(self) -> ElectionSetup:
        setting, start = self.setting, self.start
        return ElectionSetup(
            self.engine, start.initial_model(), start.train, setting.seed, setting.election, self.shards, start.liars
        )

    def _drift(self) -> None:
        """Replace the samples of all clients by those of the later split."""
        assert self.setting.drift is not None
        split = self.setting.drift[1]
        self.start.use_split(split)
        self.evaluator.use_split(split)
        self._losses = None

    def _pick_last_step(self) -> None:
        """Pick the steps of the personal last step on the samples held out so far, beside the round that begins."""
        _, picks, deployed = self.evaluator.deploy(self.banks, self._known_losses())
        self.traffic.scalars += self.last_step.pick(deployed, picks)

    def _change_clusters(self, now: int) -> None:
        """Carry out what was decided and takes effect after round `now`; then hold a survey or a by-election if one is
        due."""
        merging, revival = self.merging, self.revival
        if merging is not None and (plans := merging.take(now + 1)):
            self._merge(merging, plans, now + 1)
        if revival is not None and (opened := revival.take(now)) is not None:
            self._open_clusters(revival, opened, now)
        surveyed = merging is not None and merging.is_due(now + 1)
        if merging is not None and surveyed:
            unfit = () if revival is None else revival.unfit
            self.traffic.scalars += merging.survey(self.banks, self.assignments, now + 1, unfit)
        if revival is not None:
            self._revive(revival, now, surveyed)

    def _open_clusters(self, revival: Revival, opened: Sequence[tuple[int, int, Tensor]], now: int) -> None:
        """Open the clusters that an election decided to: (part of the graph, cluster, model)."""
        parts = self._components()
        for part, slot, centre in opened:
            if slot == len(self.banks):
                self.banks = self._open(slot + 1)
                self.banks[slot] = self.banks[0]  # elsewhere a twin that no one picks
            self.banks[slot, within(self.members, parts[part])] = centre
            if self.merging is not None:
                self.merging.reopen(slot, parts[part], now + 1)
        slots = sorted({slot for _, slot, _ in opened})
        for slot in slots:
            self.exchange.open_cluster_(slot)
        revival.close(now, len(self.banks), slots)
        self._hold_out(now + 1)
        self._losses = None

    def _revive(self, revival: Revival, now: int, surveyed: bool) -> None:
        """Watch for lost clusters and new distributions; hold a by-election unless the round ended with a survey."""
        graph, merging, election = self.setting.graph, self.merging, self.setting.algorithm.election
        # Until the last survey nobody is elected into a cluster that has lost its followers: surveys close it.
        closed = set() if merging is None else merging.everywhere if merging.over else range(len(self.banks))
        called = revival.calls_election(self.assignments, election, now, self.setting.rounds, closed)
        if surveyed or not called:
            return
        setup, decided = self._election_setup(), list[tuple[int, int, Tensor]]()
        for number, part in enumerate(self._components()):
            shut = set(range(len(self.banks))) - set(merging.slots(part)) if merging is not None else ()
            opened, cost = revival.elect(setup, graph.subgraph(part), self.banks, now, shut)
            self.traffic.start_messages += cost.models_sent
            self.traffic.scalars += cost.scalars_sent
            decided += [(number, slot, centre) for slot, centre in opened]
        revival.decide(now, decided)

    def _merge(self, merging: SurveyRounds, plans: Sequence[Plan], now: int) -> None:
        """Merge and close clusters; plans: by part of the graph."""
        for part, plan in zip(merging.parts, plans, strict=True):
            rows = within(self.members, part)
            for merge in plan.merges:
                for row in rows:  # one at a time, for a bank may be larger than the memory
                    models = torch.stack([self.banks[merge.into, row], self.banks[merge.closed, row]])
                    merge_(models, [merge._replace(into=0, closed=1)])
                    self.banks[merge.into, row] = models[0]
                self.assignments[[i for i in part if self.assignments[i] == merge.closed]] = merge.into
            self.exchange.merge_(plan, part)
            if self.revival is not None and (plan.closed or merging.over):
                self.revival.forget_lowest(part)
        if merging.over:
            self._renumber(merging)
        self._hold_out(now)
        self._losses = None

    def _renumber(self, merging: SurveyRounds) -> None:
        """Number the clusters that are left anew, and drop the models of the others."""
        orders, clusters = merging.renumber(), len(merging.closed)
        for part, order in orders:
            for row in within(self.members, part):
                self.banks[:, row] = self.banks[order, row]
            place = torch.tensor(order).argsort()
            place[place >= clusters] = -1  # who has trained a cluster while it was being closed chooses anew
            some = [i for i in part if self.assignments[i] >= 0]
            self.assignments[some] = place[self.assignments[some]]
        self.banks = self._open(clusters)
        self.exchange.renumber_([(list(part), order) for part, order in orders], clusters)
        if self.revival is not None:
            self.revival.renumber(clusters)

    def _hold_out(self, done: int) -> None:
        """Hold samples out of training after `done` rounds, if a survey or the pick of the last step needs them."""
        surveys, until = self.merging is not None and not self.merging.over, self.hold_until
        self.start.hold(surveys or (until is not None and done < until))

    def _all_losses(self) -> Tensor:
        """Compute the losses of all models of the members on their training samples, (L, m); infinite where closed."""
        merging = self.merging
        if merging is None:
            return self.engine.losses(self.banks, self.train)
        losses = self.engine.losses(self.banks, self.train, closed=merging.everywhere)
        return self._without_closed(losses, self.members)

    def _known_losses(self) -> Tensor | None:
        """Return the losses where they are known, or some models are closed: the evaluator computes any others."""
        return self._all_losses() if self._losses is None and self.merging is not None else self._losses

    def _without_closed(self, losses: Tensor, clients: Sequence[int]) -> Tensor:
        """Make the losses (C, m) of models that are closed in a client's part of the graph infinite."""
        if self.merging is None or len(self.merging.parts) == 1:  # the engine knows what is closed everywhere
            return losses
        return losses.masked_fill(self.merging.closed[:, list(clients)].T.to(losses.device), math.inf)

    def _components(self) -> list[list[int]]:
        return sorted(sorted(part) for part in nx.connected_components(self.setting.graph))

    def _work(self, here: Sequence[int], now: int) -> tuple[Tensor, list[Choice], Tensor]:
        """Choose and train for the members at places `here`; returns their losses (C, m), choices, and whose model is
        finite (C,). Trained models are written to the clients' banks; a server gets their mean."""
        known, needs = self._known(here)
        choices: list[Choice] = []
        means = torch.zeros(len(here), self.models)
        fine = torch.zeros(len(here), dtype=torch.bool)
        sums = torch.zeros_like(self.banks[:, 0]) if self.shared else None
        counts = torch.zeros(self.models, dtype=torch.int64)  # clients, or their samples, behind the sums
        choose = partial(self._choose, here, now)
        closed = self.merging.everywhere if self.merging is not None else ()
        in_place = not self.shared and self.setting.privacy is None
        task = LocalTask(self.banks, self.train, choose, now, needs, known, self.members.start, in_place, closed)
        engine, stages = self.engine, self.start.stages
        if is_quiet(now, self.setting.quiet_from):  # choose, and take no step
            engine, stages = quiet(engine, stages)
        for done in work(engine, task, here, stages, self.setting.algorithm.trains == "all"):
            some = slice(done.positions[0], done.positions[-1] + 1)
            means[some], fine[some] = done.losses.to(means), torch.tensor(done.fine)
            choices += done.choices
            self.seconds["train"] -= done.looked_s
            self.seconds["assign"] += done.looked_s
            self._store(done, here, sums, counts)
        if sums is not None:
            sums, counts = self.shards.sum(sums), self.shards.sum(counts)
            for j, count in enumerate(counts.tolist()):
                if count:
                    self.banks[j, 0] = sums[j] / count
        return means, choices, fine

    def _choose(self, here: Sequence[int], now: int, position: int, means: Tensor, samples: Tensor | None) -> Choice:
        """Choose the model that the member at a place of `here` trains."""
        client = self.members[here[position]]
        means = self._without_closed(means[None], [client])[0]
        return self.start.choose(client, now, means, samples, self.train.sizes[here[position]])

    def _store(self, done: TrainedChunk, here: Sequence[int], sums: Tensor | None, counts: Tensor) -> None:
        """Write trained models to the banks, or add them to a server's sums; an update that diverged is undone."""
        layout = self.start.layout
        if done.vectors is None:
            for position, choice, fine in zip(done.positions, done.choices, done.fine, strict=True):
                if fine and layout is not None:
                    layout.spread_(self.banks[:, here[position]], choice.cluster)
            return
        for position, choice, vector, fine in zip(done.positions, done.choices, done.vectors, done.fine, strict=True):
            if not fine:
                continue
            if (privacy := self.setting.privacy) is not None:
                client = self.members[here[position]]
                before = self.banks[choice.cluster, 0 if self.shared else here[position]]
                noise = simulated_noise(len(vector), self.setting.seed, client, self.round)
                vector = protect(before, vector, privacy, noise)
            if sums is not None:
                if self.start.liars is not None:
                    client = self.members[here[position]]
                    if client in self.start.liars:
                        self.start.liars.note_first(client, vector)
                    vector = self.start.liars.tell(client, choice.cluster, self.round, vector)
                vector = self.exchange.decoded(self.members[here[position]], choice.cluster, self.round, vector)
                weight = self.train.sizes[here[position]] if self.exchange.weights == "samples" else 1
                sums[choice.cluster] += vector if weight == 1 else weight * vector
                counts[choice.cluster] += weight
            elif vector.dim() == 2:
                self.banks[:, here[position]] = vector
            else:
                self.banks[choice.cluster, here[position]] = vector
                if layout is not None:
                    layout.spread_(self.banks[:, here[position]], choice.cluster)

    def _known(self, here: Sequence[int]) -> tuple[Tensor | None, Needs]:
        """Return the losses that the last evaluation has left, and what the clients need to see of their models."""
        needs = self.setting.algorithm.needs
        kept, self._losses = self._losses, None
        if needs == "nothing" or (self.models == 1 and self.revival is None):
            return None, "nothing"
        if self.merging is not None and not self.merging.over:
            return self.merging.held_losses(self.banks)[list(here)], needs
        return (None if kept is None or needs != "losses" else kept[list(here)]), needs

    def _gather(
        self, present: Sequence[int], here: Sequence[int], means: Tensor, choices: Sequence[Choice], fine: Tensor
    ) -> Tensor:
        """Gather what all clients of the round chose, and who has a model to send, (N,) bool."""
        means = self._without_closed(means, [self.members[place] for place in here])
        polled = self.models if self.merging is not None and not self.merging.over else 0
        mine = torch.zeros(len(self.members), 3 + polled, dtype=torch.float64)
        mine[here, 0] = torch.tensor([choice.cluster for choice in choices], dtype=torch.float64)
        mine[here, 1] = fine.double()
        if self.revival is not None:
            mine[here, 2] = means.cpu().double().nan_to_num(nan=float("inf")).min(dim=1).values
        if polled:
            mine[here, 3:] = means.cpu().double()
        chosen, sent, lowest_losses, *losses = self.shards.gather(mine).T
        self._remember(here, choices)
        if self.merging is not None and losses:
            self.merging.note_losses(present, torch.stack(losses, dim=1))
        if self.revival is not None:
            self.revival.watch(lowest_losses, present)
        before, after = self.assignments[present], chosen[present].long()
        self.changed = int(((before != after) & (before >= 0)).sum())
        self.assignments[present] = after
        self.diverged |= {i for i in present if not sent[i]}
        return torch.gt(sent, 0)

    def _remember(self, here: Sequence[int], choices: Sequence[Choice]) -> None:
        """Take in what the clients of the round remember from now on; all ranks know it of all."""
        memory = self.start.memory
        if memory is None:
            return
        mine = memory[self.members.start : self.members.stop].clone()
        for place, choice in zip(here, choices, strict=True):
            if choice.memory is not None:
                mine[place] = choice.memory.to(mine)
        self.start.memory = self.shards.gather(mine)

    def _exchange(self, present: Sequence[int], senders: Tensor, now: int, measure: bool) -> list[float]:
        """Send and mix; returns how far the averages drifted by it, if measured."""
        kind = self.setting.algorithm.exchange
        if kind == "server":
            self.exchange.upload(present, senders, self.assignments)
        if kind != "gossip":
            return [0.0] * self.models if measure else []
        drift = metrics.Drift(self.banks, self.setting.clients) if measure else None
        merging, receivers = self.merging, torch.zeros_like(senders)
        receivers[list(present)] = True
        every = torch.ones(self.models, self.setting.clients, dtype=torch.bool)
        open, settled = (every, True) if merging is None else (~merging.closed, merging.over)
        sent = Sent(receivers, senders, self.assignments, now, open, settled)
        if self.selection is None:
            self.exchange.gossip_(self.banks, sent, drift)
        else:
            self.selection.exchange_(self.banks, sent, self.traffic, drift)
        return [] if drift is None else drift.result(self.shards.sum).tolist()

    def _evaluate(self, scope: Scope | None = None) -> JsonObject:
        """Score the state after a round."""
        setting, key, merging = self.setting, self.setting.learns.metric.key, self.merging
        last_step = self.last_step if self.done and self.last_step.active else None
        closed = None if merging is None else merging.closed
        scores = self.evaluator.score(self.banks, self.assignments, scope, self._known_losses(), last_step, closed)
        before = scores.before if self.evaluator.honest is None else scores.before[self.evaluator.honest]
        before = before[~before.isnan()].mean()
        return {
            "round": self.round,
            **scores.row,
            **({f"{key}_before_personal": float(before)} if self.last_step.active else {}),
            "changed": self.changed,
            **({} if setting.privacy is None else {"epsilon": self.epsilon}),
            **self.traffic.row(self.start.sent_size * self.banks.element_size(), self.start.payload_bytes),
            **({} if self.selection is None else self.selection.row()),
            "election": [asdict(turn) for turn in self.elections[0].turns] if self.elections else None,
            **({} if merging is None else {"merges": merging.log}),
            # at the end everybody is scored: an exported model has its score
            **({f"{key}_by_client": scores.by_client.tolist()} if self.done else {}),
            **({f"{key}_before_personal_by_client": scores.before.tolist()} if last_step else {}),
            **(last_step.row() if last_step else {}),
        }

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin
