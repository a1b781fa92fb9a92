"""The synchronous simulator: all clients of a round at once, on stacked banks.

One round is Algorithm 1 of the paper for every client: assign, train, exchange. `core.client` says what one client
does; this file does the same for N of them with closed forms and batched calls. A test says so for every algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from dfca import metrics
from dfca.core.algorithm import SHARES, Algorithm, Choice, Share, View
from dfca.core.client import effective, participates, share_rule, weight_rule
from dfca.core.local import LocalOptions, lowest
from dfca.core.mixing import WEIGHT_RULES, WeightRule
from dfca.core.params import FlatModel, initial
from dfca.core.rng import seeded, stream
from dfca.data.clients import Split
from dfca.errors import ConfigError, DataError, ModelError, unknown
from dfca.sim.election import Outcome, elect
from dfca.sim.engine import ENGINES, EngineName, finetuned, make_engine
from dfca.sim.exchange import Exchange
from dfca.sim.revival import Revival

AGGREGATIONS = ("batch", "sequential")
PHASES = ("start", "assign", "train", "mix", "evaluate")


@dataclass(frozen=True)
class Setting:
    """Everything one simulation needs.

    make_model builds a freshly initialised module on the CPU. clusters None: found by the clients where the algorithm
    elects its start, else the true number. drift: a round, and the split that replaces `split` when it begins.
    """

    split: Split
    graph: nx.Graph
    make_model: Callable[[], nn.Module]
    algorithm: Algorithm
    clusters: int | None
    rounds: int
    seed: int = 0
    local: LocalOptions = field(default_factory=LocalOptions)
    participation: float = 1.0
    weights: WeightRule = "uniform"
    aggregation: str = "batch"
    share: Share = "trained"
    drift: tuple[int, Split] | None = None
    evaluate_every: int = 10
    evaluation_samples: int = 200
    device: str = "cpu"
    engine: EngineName = "auto"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        clients = self.clients
        if self.clusters is not None and not 1 <= self.clusters <= clients:
            raise ConfigError(f"clusters must be in 1..{clients} (the number of clients), got {self.clusters}")
        told = self.algorithm.start != "elected" and self.algorithm.models == "clusters"
        if self.clusters is None and told and self.split.clusters is None:
            raise ConfigError(
                f"{self.algorithm.name} cannot find the number of clusters, and nobody knows it here; give clusters"
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation must be in (0, 1], got {self.participation}")
        if self.evaluate_every < 1:
            raise ConfigError(f"evaluation.every must be >= 1, got {self.evaluate_every}")
        if self.evaluation_samples < 2:
            raise ConfigError(f"evaluation.samples must be >= 2, got {self.evaluation_samples}")
        for kind, value, known in (
            ("weights", self.weights, WEIGHT_RULES),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("share", self.share, SHARES),
            ("engine", self.engine, ENGINES),
        ):
            if value not in known:
                raise unknown(kind, value, known)
        if sorted(self.graph.nodes) != list(range(clients)):
            raise ConfigError(
                f"the graph must have the nodes 0..{clients - 1}, one per client; it has {len(self.graph)}"
            )
        if self.graph.is_directed() or self.graph.is_multigraph() or nx.number_of_selfloops(self.graph):
            raise ConfigError(
                "the graph must be undirected, without loops and double edges; convert it by nx.Graph(graph)"
            )
        if self.algorithm.informed and self.split.clusters is None:
            raise DataError(
                f"{self.algorithm.name} needs true clusters, and this split has none; leave it out of `algorithms`"
            )

    @property
    def clients(self) -> int:
        """Count the clients."""
        return len(self.split.train.sizes)

    @property
    def true_clusters(self) -> int:
        """Count the true clusters, those after a drift included; 1 where nobody knows."""
        splits = [self.split, *(self.drift[1:] if self.drift else ())]
        return max(1 if split.clusters is None else int(split.clusters.max()) + 1 for split in splits)


class Simulation:
    """A running simulation: `step` does one round; `state` and `restore` carry it over a restart, bit by bit."""

    def __init__(self, setting: Setting) -> None:
        self.setting, algorithm = setting, setting.algorithm
        device, dtype = setting.device, setting.dtype
        probe = initial_module(setting)
        self.flat = FlatModel(probe.to(dtype)).to(device)
        self.train, self.test = setting.split.train.to(device, dtype), setting.split.test.to(device, dtype)
        self._check_outputs()
        self.engine = make_engine(
            setting.engine, self.flat, effective(setting.local, algorithm), setting.seed, self.train, device
        )
        self.truth = setting.split.clusters
        self.shared = algorithm.exchange == "server"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.elections: list[Outcome] = []
        with self._timed("start"):
            self.banks = self._start()
        self.exchange = Exchange(
            setting.graph,
            algorithm,
            self.models,
            weight_rule(algorithm, setting.weights),
            setting.aggregation,
            share_rule(algorithm, setting.share),
            setting.seed,
            device,
        )
        self.revival = Revival(setting.clients, self.models) if algorithm.revives else None
        self.distributions = self._distributions()
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
        return tuple(found)

    @property
    def done(self) -> bool:
        """Tell whether all rounds are over."""
        return self.round >= self.setting.rounds

    def bank(self, client: int) -> Tensor:
        """Copy the models that a client holds: (m, P)."""
        return self.banks[:, 0 if self.shared else client].clone()

    def model(self, client: int, cluster: int | None = None) -> nn.Module:
        """Make a module from a model of a client; without a cluster, the one that it trains."""
        chosen = max(0, int(self.assignments[client])) if cluster is None else cluster
        if not 0 <= chosen < self.models:
            raise ConfigError(f"cluster must be in 0..{self.models - 1}, got {chosen}")
        return self.flat.to_module(self.banks[chosen, 0 if self.shared else client])

    def step(self) -> dict[str, Any] | None:
        """Do one round; returns the metrics where the round is evaluated."""
        setting, now = self.setting, self.round
        if setting.drift is not None and now == setting.drift[0]:
            self._drift()
        present = [i for i in range(setting.clients) if participates(setting.seed, i, now, setting.participation)]
        due = (now + 1) % setting.evaluate_every == 0 or now + 1 == setting.rounds
        with self._timed("assign"):
            choices = self._choose(present, now)
        with self._timed("train"):
            senders = self._train(present, choices, now)
        with self._timed("mix"):
            moved = self._exchange(present, senders, now, measure=due)
        if self.revival is not None:
            with self._timed("start"):
                self._revive(now)
        self.round = now + 1
        if not due:
            return None
        with self._timed("evaluate"):
            found = self._evaluate()
        return {**found, "mixing_drift": moved, "seconds": dict(self.seconds)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Give everything a checkpoint needs: tensors, and facts that JSON can hold. The tensors are not copies."""
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
        }
        return {**tensors, "bank": self.banks, "assignments": self.assignments}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from a state."""
        stored, fresh = tuple(tensors["bank"].shape), tuple(self.banks.shape)
        if stored[1:] != fresh[1:] or (stored != fresh and self.revival is None):
            raise ConfigError(f"the checkpoint's bank is {stored}, this run's {fresh}")
        if stored == fresh:
            self.banks.copy_(tensors["bank"])
        else:
            self.banks = tensors["bank"].to(self.banks.device, copy=True)
        self.assignments = tensors["assignments"].clone()
        self.exchange.restore(tensors, facts)
        if self.revival is not None:
            self.revival.restore(tensors)
        self.round, self.changed, self.diverged = facts["round"], facts["changed"], set(facts["diverged"])
        self.start_messages, self.seconds = facts["start_messages"], dict(facts["seconds"])
        if self.setting.drift is not None and self.round > self.setting.drift[0]:
            self._drift()
        self._losses = None

    def _start(self) -> Tensor:
        """Draw or elect the banks (m, N, P), or (m, 1, P) where a server keeps one for all."""
        setting, algorithm = self.setting, self.setting.algorithm
        if algorithm.start == "elected":
            return self._elect()
        clusters = setting.clusters
        if clusters is None or algorithm.informed:
            clusters = setting.true_clusters
        models, rows = algorithm.bank_size(clusters), 1 if self.shared else setting.clients
        banks = torch.empty(models, rows, self.flat.size, dtype=setting.dtype, device=setting.device)
        for j in range(models):
            if algorithm.start == "shared":
                banks[j] = initial(self.flat, setting.make_model, setting.seed, "init", j)
            else:
                for i in range(rows):
                    banks[j, i] = initial(self.flat, setting.make_model, setting.seed, "init", j, i)
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
            )
            for part in components
        ]
        models = max(len(outcome.centres) for outcome in self.elections)
        banks = torch.empty(models, setting.clients, self.flat.size, dtype=setting.dtype, device=setting.device)
        for part, outcome in zip(components, self.elections, strict=True):
            banks[:, part] = outcome.centres[0]
            banks[: len(outcome.centres), part] = outcome.centres[:, None]
        return banks

    def _drift(self) -> None:
        """Let the clients hold other samples from now on."""
        assert self.setting.drift is not None
        split, device, dtype = self.setting.drift[1], self.setting.device, self.setting.dtype
        self.train, self.test = split.train.to(device, dtype), split.test.to(device, dtype)
        self.truth = split.clusters
        self.distributions = self._distributions()
        self._losses = None

    def _distributions(self) -> list[metrics.Distribution]:
        split = Split(self.train, self.test, self.truth, self.setting.split.classes)
        return metrics.distributions(split, self.setting.evaluation_samples, self.setting.seed)

    def _revive(self, now: int) -> None:
        """Watch for lost clusters and new distributions; open the centres that an election accepts."""
        setting, revival, options = self.setting, self.revival, self.setting.algorithm.election
        assert revival is not None
        if not revival.calls_election(self.assignments, options, now):
            return
        start = initial(self.flat, setting.make_model, setting.seed, "init", 0).to(setting.device)
        slots = set()
        for part in self._components():
            within = setting.graph.subgraph(part)
            opened, cost = revival.elect(self.engine, start, self.train, self.banks, within, setting.seed, options, now)
            self.start_messages += cost.models_sent
            self.exchange.scalars += cost.scalars_sent
            for slot, centre in opened:
                if slot == len(self.banks):
                    self.banks = torch.cat([self.banks, self.banks[:1]])  # elsewhere a twin that no one picks
                self.banks[slot, part] = centre
                slots.add(slot)
        for slot in sorted(slots):
            self.exchange.open_cluster_(slot)
        revival.close(now, len(self.banks), sorted(slots))
        self._losses = None

    def _components(self) -> list[list[int]]:
        return sorted(sorted(part) for part in nx.connected_components(self.setting.graph))

    def _choose(self, present: Sequence[int], now: int) -> list[Choice]:
        """Let every client of the round choose the model that it trains."""
        seed, algorithm = self.setting.seed, self.setting.algorithm
        means, samples = self._look(present)
        if self.revival is not None:
            self.revival.watch(means, present)
        choices = []
        for position, client in enumerate(present):
            random = partial(stream, seed, "choose", client, now)
            told = self._truth(client) if algorithm.informed else None
            choices.append(algorithm.choose(View(means[position], random, samples[position], told)))
        chosen = torch.tensor([choice.cluster for choice in choices], dtype=torch.int64)
        before = self.assignments[present]
        self.changed = int(((before != chosen) & (before >= 0)).sum())
        self.assignments[present] = chosen
        return choices

    def _look(self, present: Sequence[int]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Compute what the algorithm wants to see: mean losses (C, m), and losses per sample, C tensors (m, n_i)."""
        needs, everybody = self.setting.algorithm.needs, len(present) == self.setting.clients
        kept, self._losses = self._losses, None
        nothing: list[Tensor | None] = [None] * len(present)
        blind = needs == "nothing" or (self.models == 1 and self.revival is None)
        if blind or not present:
            device = self.banks.device
            samples = [torch.zeros(1, size, device=device) for size in self.train.sizes] if needs == "samples" else []
            return torch.zeros(len(present), self.models), [samples[i] for i in present] if samples else nothing
        if kept is not None and everybody:
            return kept, nothing
        data = self.train if everybody else self.train.subset(present)
        rows = None if everybody else present
        if needs == "losses":
            return self.engine.losses(self.banks, data, rows), nothing
        each = self.engine.sample_losses(self.banks, data, rows)
        return torch.stack([losses.mean(dim=1) for losses in each]), each

    def _train(self, present: Sequence[int], choices: Sequence[Choice], now: int) -> Tensor:
        """Train every client's choice; returns which clients have a model to send, (N,) bool.

        Where clients keep their own banks the trained models are written there; a server gets their mean.
        """
        device = self.banks.device
        clusters = torch.tensor([choice.cluster for choice in choices], dtype=torch.int64, device=device)
        rows = torch.zeros_like(clusters) if self.shared else torch.tensor(present, device=device)
        senders = torch.zeros(self.setting.clients, dtype=torch.bool)
        sums = torch.zeros_like(self.banks[:, 0]) if self.shared else None
        counts = [0] * self.models

        def start(positions: Sequence[int]) -> Tensor:
            some = slice(positions[0], positions[-1] + 1)
            return self.banks[clusters[some], rows[some]]

        for positions, trained in self.engine.train(present, start, choices, self.train, now):
            some = slice(positions[0], positions[-1] + 1)
            finite = torch.isfinite(trained).all(dim=1)
            for position, fine in zip(positions, finite.tolist(), strict=True):
                senders[present[position]] = fine
                if not fine:
                    self.diverged.add(present[position])
            if sums is None:
                # an update that diverged is undone
                self.banks[clusters[some][finite], rows[some][finite]] = trained[finite]
                continue
            for position, vector, fine in zip(positions, trained, finite.tolist(), strict=True):
                if fine:
                    j = choices[position].cluster
                    sums[j] += vector
                    counts[j] += 1
        if sums is not None:
            for j, count in enumerate(counts):
                if count:
                    self.banks[j, 0] = sums[j] / count
        return senders

    def _exchange(self, present: Sequence[int], senders: Tensor, now: int, measure: bool) -> list[float]:
        """Send and mix; returns how far the averages drifted by it, if measured."""
        kind = self.setting.algorithm.exchange
        if kind == "server":
            self.exchange.upload(present, senders, self.assignments)
        if kind != "gossip":
            return [0.0] * self.models if measure else []
        before = metrics.averages(self.banks) if measure else None
        self.exchange.gossip_(self.banks, present, senders, self.assignments, now)
        return metrics.drift(before, metrics.averages(self.banks)).tolist() if before is not None else []

    def _evaluate(self) -> dict[str, Any]:
        """Score the state after a round. Keeps the training losses: the next round assigns by the same ones."""
        truth = self.truth if self.setting.algorithm.models == "clusters" else None
        losses, picks, deployed = self._deploy()
        scores = self.engine.accuracy(deployed, self.test)
        picked = losses.cpu().gather(1, picks[:, None])[:, 0].double()
        model_bytes = self.flat.size * self.banks.element_size()
        messages = int(self.exchange.messages_by_client.sum())
        return {
            "round": self.round,
            "accuracy": float(scores.mean()),
            "accuracy_std_over_clients": float(scores.std(correction=0)),
            "all_models_accuracy": self._all_models_accuracy(),
            "cluster_accuracy": None if truth is None else metrics.cluster_accuracy(picks, truth),
            "adjusted_rand_index": None if truth is None else metrics.adjusted_rand_index(picks, truth),
            "live_clusters": len(set(picks.tolist())),
            "models": self.models,
            "changed": self.changed,
            "train_loss": float(picked.mean()),
            "F_global": float(picked.sum()),
            "disagreement": metrics.disagreement(self.banks).tolist(),
            "messages_sent": messages,
            "bytes_sent": (messages + self.start_messages) * model_bytes + 4 * self.exchange.scalars,
            "start_bytes": self.start_messages * model_bytes,
            "scalars_sent": self.exchange.scalars,
            "server_bytes_sent": self.exchange.server_messages * model_bytes,
            "messages_by_client": self.exchange.messages_by_client.tolist(),
            "messages_by_cluster": self.exchange.messages_by_cluster.tolist(),
            "model_bytes": model_bytes,
            "assignments": picks.tolist(),
            "election": [asdict(turn) for turn in self.elections[0].turns] if self.elections else None,
        }

    def _deploy(self) -> tuple[Tensor, Tensor, Callable[[Sequence[int]], Tensor]]:
        """Settle what every client deploys: training losses (N, m), the picks (N,), and how to gather the vectors."""
        algorithm, clients = self.setting.algorithm, self.setting.clients
        if algorithm.personal is not None:
            each = self.engine.sample_losses(self.banks, self.train)
            losses = torch.stack([samples.mean(dim=1) for samples in each])
            mixed = torch.stack([algorithm.personal(self.bank(i), each[i]) for i in range(clients)])
            tuned = finetuned(self.engine, mixed, self.train, algorithm.finetune_steps)
            return losses, _lowest_of_rows(losses), lambda some: tuned[some[0] : some[-1] + 1]
        losses = self.engine.losses(self.banks, self.train)
        if algorithm.needs == "losses":
            self._losses = losses
        told = self.truth if algorithm.informed else None
        picks = _lowest_of_rows(losses) if told is None else told
        columns = picks.to(self.banks.device)
        rows = torch.zeros_like(columns) if self.shared else torch.arange(clients, device=self.banks.device)
        return losses, picks, lambda some: self.banks[columns[some[0] : some[-1] + 1], rows[some[0] : some[-1] + 1]]

    def _all_models_accuracy(self) -> float | None:
        if not self.distributions:
            return None
        scores = [self.engine.score_on(self.banks, *distribution) for distribution in self.distributions]
        return float(torch.stack(scores).mean())

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


def initial_module(setting: Setting) -> nn.Module:
    """Build the module that cluster 0 starts from; the architecture of all."""
    with seeded(setting.seed, "init", 0):
        return setting.make_model()


def _lowest_of_rows(losses: Tensor) -> Tensor:
    return torch.tensor([lowest(row) for row in losses])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
