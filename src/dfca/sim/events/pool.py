"""The models, samples and work of all clients: what peers ask for, done for many of them in one call of the engine.

All models stand in one tensor (K, N, P): a peer's bank is a view of it, and what is trained is written in place where
the engine can. With a server the tensor is the server's (K, 1, P), and its clients hold what it handed down. This file
knows nothing of time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.base.accountant import epsilon
from dfca.base.memory import explain_oom
from dfca.core.algorithm import Choice
from dfca.core.exchange import is_quiet, quiet_from
from dfca.core.learning.params import initial
from dfca.core.privacy import protect, simulated_noise
from dfca.core.rng import stream
from dfca.core.rules.election import Parts, divide
from dfca.core.rules.personal import GRID
from dfca.data.clients import ClientData
from dfca.peer.records.lineage import Clusters
from dfca.peer.records.work import Curve, Draw, Job, Losses, Observe, OwnCurve, Score, Train, Trained, Warm, WarmUp
from dfca.sim.evaluation import Evaluator
from dfca.sim.events.books import RunLog
from dfca.sim.events.world import SERVER
from dfca.sim.local.bank import Bank
from dfca.sim.local.engine import LocalTask, Needs, TrainedChunk
from dfca.sim.local.planned import quiet, work
from dfca.sim.notes import notes_of
from dfca.sim.personal import LastSteps, measure_curves, observe_all
from dfca.sim.setting import Setting
from dfca.sim.shards import PIECE_BYTES, members_of, portions
from dfca.sim.start import Start, take_rows

AHEAD_BYTES = 2**28
"""Models that wait for the end of their jobs take no more memory than this."""
_FACTS = ("drifted", "changed", "assigned", "diverged", "memories", "releases", "noises", "sent_noises")


class Order(NamedTuple):
    """A job of a client, and the bank (m, P) that it is for."""

    client: int
    job: Job
    bank: Tensor | None


class ClientPool:
    """The clients' models and samples. `dry`: nothing is computed, and models have no numbers. rounds: of the run,
    those of the setting if not given; 0: unknown.

    assigned: the cluster that each client trained last, -1 for none; changed: how often a client changed it since the
    last evaluation; memories: what clients will remember once their job has ended; releases: how often each has trained
    a model that it may send.
    """

    def __init__(self, setting: Setting, dry: bool, rounds: int | None = None) -> None:
        self.setting, self.seed, self.dry, algorithm = setting, setting.seed, dry, setting.algorithm
        self.start = Start(setting)
        self.flat, self.engine, self.shared = self.start.flat, self.start.engine, self.start.shared
        self.liars = self.start.liars
        self.size = 0 if dry else self.flat.size
        self._evaluator = Evaluator(self.start)
        self.rounds = setting.rounds if rounds is None else rounds
        self.last_step = LastSteps(self.start, self.rounds)
        self._divided: dict[tuple[int | None, bool], list[ClientData]] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self.drifted, self.changed = False, 0
        self.assigned = [-1] * setting.clients
        self.diverged: set[int] = set()
        self.releases = [0] * setting.clients
        # By client, the numbers of its newest noise and of the newest that has left: after a return without models it
        # may train a round again, and noise that has left must not come again.
        self.noises, self.sent_noises = [-1] * setting.clients, [-1] * setting.clients
        self.memories: dict[int, Tensor] = {}
        self._drawn: Tensor | None = None
        self._none = torch.zeros(0, dtype=setting.dtype)
        most = self.models
        if self.elects or algorithm.revives:
            most = max(most, algorithm.election.most, setting.clusters or 1)
        with explain_oom():
            self.banks = self.start.make_banks(self.models, most)

    # Models.

    @property
    def elects(self) -> bool:
        """Whether the clients elect their models."""
        return self.setting.algorithm.start == "elected" and not self.dry

    @property
    def models(self) -> int:
        """Count the models that a client begins with where they are drawn."""
        return 1 if self.setting.algorithm.start == "elected" else self.start.drawn_models()

    def allocate(self, client: int, models: int) -> Tensor:
        """Return a client's memory for its models: (m, P)."""
        if self.shared and client != SERVER:
            return torch.zeros(models, self.size, dtype=self.setting.dtype, device=self.setting.device)
        if models > len(self.banks):
            self.banks = self._storage.open(models)
        return self.banks[:models, 0 if self.shared else client, : self.size]

    @property
    def _storage(self) -> Bank:
        assert self.start.storage is not None  # made with the first banks
        return self.start.storage

    def empty(self, client: int) -> None:
        """Take a client's models away, and what it remembers."""
        self.start.forget(client)
        self.memories.pop(client, None)
        self.engine.kept.entries.pop(client, None)
        if not self.shared:
            self.banks[:, client] = 0

    def fill(self, held: Sequence[Clusters]) -> Tensor:
        """Put a model of a client in the places that it has no use for: others hold more, or clusters are closed.

        held (N,): which models each client holds. Returns the banks (m, N, P).
        """
        if self.shared:
            return self.banks[:, :, : self.size]
        most = max(clusters.models for clusters in held) or len(self.banks)
        for client, (models, closed) in enumerate(held):
            spare = [*closed, *range(models, most)]
            if models and spare:
                opened = next(j for j in range(models) if j not in closed)
                self.banks[spare, client] = self.banks[opened, client]
        return self.banks[:most, :, : self.size]

    # Work.

    @property
    def most_ahead(self) -> int:
        """Count the jobs that may be done before they end: none where doing several at once gains nothing."""
        if self.dry or self.engine.how == "loop":
            return 0
        models = len(self.banks) if self.setting.algorithm.trains == "all" else 1
        return AHEAD_BYTES // (models * self.size * self.banks.element_size())

    def execute(self, orders: Sequence[Order], in_place: bool = False) -> list[Any]:
        """Do jobs; returns their results in the same order. in_place: trained models may be written to the bank at
        once, for all of the jobs end now.

        What comes of a round counts once it is handed over (`settle`).
        """
        results: list[Any] = [None] * len(orders)
        kinds: dict[type, list[int]] = {}
        for place, order in enumerate(orders):
            kinds.setdefault(type(order.job), []).append(place)
        for kind, places in kinds.items():
            some = [orders[place] for place in places]
            for place, result in zip(places, self._do(kind, some, in_place), strict=True):
                results[place] = result
        return results

    def _do(self, kind: type, orders: Sequence[Order], in_place: bool) -> Iterable[Any]:
        if kind is Train:
            return self._train(orders, in_place)
        if kind is WarmUp:
            return self._warm_up(orders)
        if kind is Score:
            return self._score(orders)
        if kind is Observe:
            return self._observe(orders)
        if kind is Curve:
            return self._measure(orders)
        return [None if kind is not Draw else self._draw(order.client) for order in orders]

    def _draw(self, client: int) -> Tensor:
        """Draw the models that a client begins with: (m, P)."""
        setting, models = self.setting, self.models
        if self.dry:
            return torch.zeros(models, 0, dtype=setting.dtype)
        shared = setting.algorithm.start == "shared"
        if shared and self._drawn is not None:
            return self._drawn
        who = () if shared else (max(0, client),)
        drawn = [initial(self.flat, setting.make_model, self.seed, "init", j, *who) for j in range(models)]
        models_drawn = torch.stack(drawn).to(setting.device)
        if self.start.layout is not None:
            self.start.layout.spread_(models_drawn, 0)
        self._drawn = models_drawn if shared else None
        return models_drawn

    def _train(self, orders: Sequence[Order], in_place: bool) -> list[Trained]:
        """Train for all in one call per number of models; with a server, per bank that they hold."""
        trained: dict[int, Trained] = {}
        groups: dict[tuple[Any, ...], list[Order]] = {}
        for order in orders:
            assert isinstance(order.job, Train)
            assert order.bank is not None
            models, where = order.bank.shape[0], order.bank.data_ptr() if self.shared else 0
            if self.dry:
                trained[order.client] = Trained(order.client % models, True, self._none, math.inf)
            else:
                alike = self.is_quiet(order.job.round), order.job.held_out, order.job.unseen, order.job.closed
                groups.setdefault((alike, models, where), []).append(order)
        for some in groups.values():
            trained |= self._train_group(sorted(some, key=lambda order: order.client), in_place)
        return [trained[order.client] for order in orders]

    def settle(self, client: int, trained: Trained) -> None:
        """Note that a round of a client has ended."""
        self.changed += self.assigned[client] not in (-1, trained.cluster)
        self.assigned[client] = trained.cluster
        self.releases[client] += trained.fine
        self.sent_noises[client] = self.noises[client]
        if not trained.fine:
            self.diverged.add(client)
        if client in self.memories:
            assert self.start.memory is not None  # else nobody remembers anything
            self.start.memory[client] = self.memories.pop(client).to(self.start.memory)

    def _train_group(self, orders: Sequence[Order], in_place: bool) -> dict[int, Trained]:
        """Choose and train for clients whose jobs are alike and that hold as many models."""
        algorithm, places = self.setting.algorithm, [order.client for order in orders]
        bank, job = orders[0].bank, orders[0].job
        assert bank is not None
        assert isinstance(job, Train)
        rounds, data = [order.job.round for order in orders], self.samples(job.held_out)  # type: ignore[union-attr]
        needs: Needs = algorithm.needs if len(bank) > 1 or algorithm.revives else "nothing"

        def choose(position: int, means: Tensor, samples: Tensor | None) -> Choice:
            client = places[position]
            return self.start.choose(client, rounds[position], means, samples, data.sizes[client])

        banks = bank[:, None] if self.shared else self.banks[: len(bank)]
        known = self._unseen_losses(banks, places, job.closed) if job.unseen and needs == "losses" else None
        privacy, seed = self.setting.privacy, self.seed
        in_place = in_place and not self.shared and privacy is None
        task = LocalTask(banks, data, choose, rounds, needs, known, in_place=in_place, closed=job.closed)
        trained, looks = {}, algorithm.revives and needs != "nothing"  # else nobody reads the losses
        engine, stages = self.engine, self.start.stages
        if self.is_quiet(job.round):
            engine, stages = quiet(engine, stages)
        for done in work(engine, task, places, stages, algorithm.trains == "all"):
            self._remember(places, done)
            lowest = done.losses.nan_to_num(nan=math.inf).min(dim=1).values.tolist() if looks else []
            for row, position in enumerate(done.positions):
                model = done.vectors[row] if done.vectors is not None and done.fine[row] else None
                if model is not None and len(done.positions) > 1:
                    model = model.clone()  # else each keeps those of all in memory
                if model is not None and privacy is not None:
                    client, cluster = places[position], done.choices[row].cluster
                    self.noises[client] = max(rounds[position], self.sent_noises[client] + 1)
                    noise = simulated_noise(len(model), seed, client, self.noises[client])
                    model = protect(banks[cluster, 0 if self.shared else client], model, privacy, noise)
                loss = lowest[row] if looks else math.inf
                client, cluster = places[position], done.choices[row].cluster
                polled = tuple(done.losses[row].tolist()) if job.unseen and needs != "nothing" else ()
                trained[client] = Trained(cluster, bool(done.fine[row]), model, loss, data.sizes[client], polled)
        return trained

    def is_quiet(self, round: int) -> bool:
        """Return whether nobody takes a step in a round: it is one of the last, in which clients only exchange."""
        return is_quiet(round, quiet_from(self.setting.algorithm, self.rounds, self.setting.quiet_rounds))

    def _unseen_losses(self, banks: Tensor, places: Sequence[int], closed: Collection[int]) -> Tensor:
        """Compute the losses of clients on the samples that they hold out, or on the others where they hold out none:
        (C, m)."""
        seen, unseen = self.start.divided
        losses = torch.empty(len(places), len(banks), dtype=banks.dtype, device=banks.device)
        for data, wanted in ((unseen, True), (seen, False)):
            some = [row for row, place in enumerate(places) if bool(unseen.sizes[place]) is wanted]
            if some:
                rows = [places[row] for row in some]
                losses[some] = self.engine.losses(banks, data.subset(rows), rows, closed)
        return losses

    def _remember(self, places: Sequence[int], done: TrainedChunk) -> None:
        """Keep what clients will remember."""
        for position, choice in zip(done.positions, done.choices, strict=True):
            self.memories.pop(places[position], None)  # of a round that was broken off
            if choice.memory is not None:
                self.memories[places[position]] = choice.memory

    def work(self, client: int, models: int) -> int:
        """Count the multiplications of a client's round: its losses (m n P), and three per step, sample and weight."""
        offsets = self.start.train.offsets
        samples = offsets[client + 1] - offsets[client]
        looked = 0 if self.setting.algorithm.needs == "nothing" or models == 1 else models * samples
        batch = min(samples, self.setting.local.batch_size or samples)
        return (looked + 3 * self.steps(models, samples) * batch) * self.flat.size

    def steps(self, models: int, samples: int) -> int:
        """Count the local steps of a round of a client with that many models and samples; every round asks for it."""
        steps = self.setting.local.steps_of(samples)
        if (models, steps) not in self._steps:
            self._steps[models, steps] = self.setting.algorithm.steps(steps, models)
        return self._steps[models, steps]

    def _warm_up(self, orders: Sequence[Order]) -> list[Warm]:
        """Train models from the common start, for runs of clients that follow one another."""
        setting = self.setting
        start = self.start.initial_model()
        warmed: dict[tuple[int, int | None, bool], Warm] = {}
        rows = max(1, 16 * PIECE_BYTES // (start.numel() * start.element_size()))
        for (stage, held_out), run in _runs(orders, rows):
            warm, *judged = self._parts(stage, held_out)
            own = self.engine.warmed_up(
                start.expand(len(run), -1), members_of(warm, run), setting.algorithm.election, run[0]
            )
            for model in own:
                if not model.isfinite().all():
                    model.copy_(start)  # diverged: it stands with the start
            if self.liars is not None:
                for client, model in zip(run, own, strict=True):
                    model.copy_(self.liars.tell_warm(client, stage, model))
            bids, votes = (self.engine.sample_losses(own[None], members_of(part, run)) for part in judged)
            for client, model, *losses in zip(run, own, bids, votes, strict=True):
                warmed[client, stage, held_out] = Warm(model, Losses(*losses))
        return [warmed[order.client, *_samples_of(order)] for order in orders]

    def _observe(self, orders: Sequence[Order]) -> list[tuple[tuple[float, ...], float] | None]:
        """Judge pairs of models on held-out samples, for all in one call."""
        merging, held = self.setting.merging, self.start.divided[1]
        assert merging is not None  # else nobody surveys
        some = sorted((order for order in orders if held.sizes[order.client]), key=lambda order: order.client)
        if not some:
            return [None] * len(orders)
        pairs = torch.stack([order.job.models for order in some])  # type: ignore[union-attr]
        shares = [order.job.share for order in some]  # type: ignore[union-attr]
        clients = [order.client for order in some]
        rows = observe_all(self.start, clients, pairs[:, 0], pairs[:, 1], shares, merging.steps).tolist()
        judged = {client: (tuple(row[:-1]), row[-1]) for client, row in zip(clients, rows, strict=True)}
        return [judged.get(order.client) for order in orders]

    def _measure(self, orders: Sequence[Order]) -> list[OwnCurve]:
        """Measure the curves of clients, in one call for those that hold as many models, or the same of a server."""
        groups: dict[tuple[Any, ...], list[Order]] = {}
        curves: dict[int, OwnCurve] = {}
        for order in orders:
            assert isinstance(order.job, Curve)
            models = order.job.models
            where = models.data_ptr() if self.shared else 0
            groups.setdefault((len(models), where, order.job.closed), []).append(order)
        for (models, _, closed), some in groups.items():
            for portion in portions(some, models * self.size * self.banks.element_size()):
                curves |= self._measure_group(portion, closed)
        return [curves[order.client] for order in orders]

    def _measure_group(self, orders: Sequence[Order], closed: tuple[int, ...]) -> dict[int, OwnCurve]:
        clients = [order.client for order in orders]
        banks = [order.job.models for order in orders if isinstance(order.job, Curve)]
        train, held = (data.subset(clients) for data in self.start.divided)
        stacked = banks[0][:, None] if self.shared else torch.stack(banks, dim=1)
        losses = self.engine.losses(stacked, train, closed=closed)
        losses[:, list(closed)] = math.inf
        _, picks, deployed = self._evaluator.deploy(stacked, losses, train, clients)
        curves = torch.full((len(clients), len(GRID)), math.nan, dtype=torch.float64)
        if holders := [row for row, size in enumerate(held.sizes) if size]:
            parts, names = (train.subset(holders), held.subset(holders)), [clients[row] for row in holders]
            curves[holders] = measure_curves(self.engine, deployed(holders), *parts, names).cpu()
        rows = zip(clients, picks.tolist(), held.sizes, curves, strict=True)
        return {client: OwnCurve(*measured) for client, *measured in rows}

    def _score(self, orders: Sequence[Order]) -> list[Losses]:
        """Score models on the parts that bid and vote: in one call where all score the same, else stacked."""
        shared: dict[tuple[tuple[int | None, bool], int, int], list[int]] = {}
        for place, order in enumerate(orders):
            assert isinstance(order.job, Score)
            key = (_samples_of(order), order.job.models.data_ptr(), len(order.job.models))
            shared.setdefault(key, []).append(place)
        stacks: dict[tuple[tuple[int | None, bool], int], list[int]] = {}
        scores: dict[int, Losses] = {}
        for (samples, _, models), places in shared.items():
            if len(places) == 1:
                stacks.setdefault((samples, models), []).append(places[0])
            else:
                bank = orders[places[0]].job.models[:, None]  # type: ignore[union-attr]
                scores |= self._losses(samples, bank, places, orders)
        for (samples, models), places in stacks.items():
            for some in portions(places, models * self.size * 4):
                bank = torch.stack([orders[place].job.models for place in some], dim=1)  # type: ignore[union-attr]
                scores |= self._losses(samples, bank, some, orders)
        return [scores[place] for place in range(len(orders))]

    def _losses(
        self, samples: tuple[int | None, bool], bank: Tensor, places: Sequence[int], orders: Sequence[Order]
    ) -> dict[int, Losses]:
        clients = [orders[place].client for place in places]
        everybody = clients == list(range(self.setting.clients))
        parts = self._parts(*samples)[1:]
        bids, votes = (self.engine.sample_losses(bank, part if everybody else part.subset(clients)) for part in parts)
        return {place: Losses(*pair) for place, *pair in zip(places, bids, votes, strict=True)}

    # Samples.

    def samples(self, held_out: bool) -> ClientData:
        """Return the samples of all clients, or those that they do not hold out."""
        return self.start.divided[0] if held_out else self.start.train

    def drift(self) -> None:
        """Switch the clients to their later samples."""
        assert self.setting.drift is not None
        self.drifted = True
        self.memories.clear()
        self.start.use_split(self.setting.drift[1])
        self._evaluator.use_split(self.setting.drift[1])
        self._divided.clear()

    def _parts(self, stage: int | None, held_out: bool) -> list[ClientData]:
        """Divide the samples of all clients for an election, into `Parts`; the last two divisions are kept."""
        if (stage, held_out) not in self._divided:
            names = () if stage is None else (stage,)
            data = self.samples(held_out)
            parts = [divide(n, stream(self.seed, "parts", i, *names)) for i, n in enumerate(data.sizes)]
            while len(self._divided) > 1:
                del self._divided[next(iter(self._divided))]
            self._divided[stage, held_out] = [
                take_rows(data, range(data.clients), [getattr(part, name) for part in parts]) for name in Parts._fields
            ]
        return self._divided[stage, held_out]

    # Scores.

    def evaluate(self, books: RunLog, held: Sequence[Clusters], steps: Sequence[int] | None = None) -> dict[str, Any]:
        """Score everybody: a row of metrics. held (N,): which models each client holds; steps (N,): of their personal
        last steps, which they take now."""
        holding = [client for client, clusters in enumerate(held) if clusters.models]
        row: dict[str, Any] = {"time_s": books.time}
        if not self.dry:
            banks = self.fill(held)
            if steps is not None:
                self.last_step.steps = torch.tensor(steps)
            row |= {
                "round": books.rounds_done,
                **self._evaluator.score_holders(
                    banks, torch.tensor(self.assigned), holding, self.last_step, final=steps is not None
                ),
                "changed": self.changed,
                **books.traffic(self.start.sent_size * banks.element_size(), len(banks), self.start.payload_bytes),
                "election": None,
            }
            if self.setting.privacy is not None:
                row["epsilon"] = self.epsilon
        self.changed = 0
        row["without_models"] = [client for client, clusters in enumerate(held) if not clusters.models]
        return row | books.times()

    @property
    def epsilon(self) -> float:
        """What the releases so far have cost the client with the most of them; 0 without privacy."""
        privacy = self.setting.privacy
        return 0.0 if privacy is None else epsilon(privacy.noise, max(self.releases), privacy.delta)

    def personal_vector(self, client: int, held: Sequence[Clusters], steps: int) -> Tensor:
        """Make the model (P,) that a client deploys after a number of personal steps."""
        deployed = self._evaluator.deploy(self.fill(held), None)[2]([client])
        self.last_step.steps[client] = steps
        return self.last_step.take(deployed, [client])[0]

    def notes(self, models: int, left: int | None, done: int | None) -> tuple[str, ...]:
        """Return what the user should know about this run, once; models, left: as in `notes_of`; done: how many rounds
        the clients did on average, once the run has ended."""
        releases = self.rounds if done is None else max(self.releases)
        notes = notes_of(self.start, self._evaluator, models, self.diverged, left, 0 if self.dry else releases)
        name, release = self.setting.algorithm.name, self.last_step.release
        if self.dry or self.setting.last_steps != "auto":
            return notes
        if not self.rounds:
            notes += (f"{name} takes no personal last step: the run ends by time, so its last round is unknown",)
        elif release is not None and done is not None and done < release:
            notes += (
                f"{name}: the run ended after {done} rounds on average, before round {release}, in which the personal "
                "last step is picked: samples were held out for nothing; give fewer rounds, or personal.steps = 0",
            )
        return notes

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs, but the banks."""
        facts = {name: getattr(self, name) for name in _FACTS}
        memory = self.start.memory
        if self.liars is not None:
            facts["stale"] = self.liars.stale
        facts["optimizers"] = self.engine.kept.tensors()
        return facts if memory is None else {**facts, "memory": memory.clone()}

    def restore(self, state: dict[str, Any], banks: Tensor) -> None:
        """Continue from what `state` returned."""
        if state["drifted"]:
            self.drift()
        for name in _FACTS:
            setattr(self, name, state.get(name, getattr(self, name)))  # one that is added later has its first value
        if self.liars is not None:
            self.liars.stale = state["stale"]
        self.engine.kept.restore(state.get("optimizers", {}))
        self.start.memory = state.get("memory")
        self.banks = self._storage.open(len(banks))
        self.banks.copy_(banks)


def _samples_of(order: Order) -> tuple[int | None, bool]:
    """Return which samples a warm-up or a score is for: its stage, and whether some are held out."""
    assert isinstance(order.job, WarmUp | Score)
    return order.job.stage, order.job.held_out


def _runs(orders: Sequence[Order], most: int) -> list[tuple[tuple[int | None, bool], range]]:
    """Group warm-ups by their samples into runs of clients that follow one another."""
    runs: list[tuple[tuple[int | None, bool], range]] = []
    for samples in dict.fromkeys(map(_samples_of, orders)):
        for client in sorted(order.client for order in orders if _samples_of(order) == samples):
            if runs and runs[-1][0] == samples and runs[-1][1].stop == client and len(runs[-1][1]) < most:
                runs[-1] = (samples, range(runs[-1][1].start, client + 1))
            else:
                runs.append((samples, range(client, client + 1)))
    return runs
