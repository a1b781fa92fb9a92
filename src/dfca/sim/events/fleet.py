"""The clients of the event simulator and their models; this file knows nothing of time.

All models stand in one tensor (m, N, P), the evaluator's own: a client's bank is a view of it, folds and trained models
are written in place. With a server the tensor is the server's (m, 1, P), and the clients share a snapshot of it.
Messages hold a snapshot per trained model, shared by all its receivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dfca.core.algorithm import Choice, View
from dfca.core.client import Client, ClientState, Message, share_rule, usable
from dfca.core.elector import Elector
from dfca.core.params import FlatModel
from dfca.core.relay import Offer
from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.bank import told_memory
from dfca.sim.engine import Engine, Task
from dfca.sim.evaluation import Evaluator
from dfca.sim.events.snapshot import Packer, Unpacker
from dfca.sim.events.trace import Ledger
from dfca.sim.events.world import SERVER
from dfca.sim.notes import notes_of
from dfca.sim.setting import Setting, initial_module
from dfca.sim.start import Start
from dfca.sim.traffic import Traffic


def make_clients(setting: Setting) -> list[Client]:
    """Make the clients of a setting."""
    flat = FlatModel(initial_module(setting).to(setting.dtype))
    train = setting.split.train.to("cpu", setting.dtype)
    truth = setting.split.clusters
    told = setting.clusters is None or setting.algorithm.informed
    return [
        Client(
            id=i,
            degree=setting.graph.degree(i),
            x=train.of(i)[0],
            y=train.of(i)[1],
            model=flat,
            make_model=setting.make_model,
            algorithm=setting.algorithm,
            clusters=setting.true_clusters if told else setting.clusters or 1,
            local=setting.local,
            seed=setting.seed,
            weights=setting.weights,
            share=setting.share,
            true_cluster=None if truth is None else int(truth[i]),
        )
        for i in range(setting.clients)
    ]


class Fleet:
    """The clients and their states, the server's last. `dry`: nothing is computed.

    seen: the lowest loss that each client saw when it last chose; bare: the clients that hold no models.
    """

    def __init__(self, setting: Setting, dry: bool) -> None:
        self.setting, self.seed, self.dry = setting, setting.seed, dry
        self.start = Start(setting)
        # An elected start is one row until the election has been held.
        models = 1 if setting.algorithm.start == "elected" else self.start.drawn_models()
        with told_memory():
            self.banks = self.start.draw_banks(models)
        self.evaluator = Evaluator(self.start)
        self.diverged: set[int] = set()
        self.size = self.start.flat.size
        self.shared = setting.algorithm.exchange == "server"
        self.silent = setting.algorithm.exchange == "none"
        self.relays = not self.silent and share_rule(setting.algorithm, setting.share) == "relay"
        self.clients = make_clients(setting)
        self.seen = [float("inf")] * setting.clients
        self.bare: set[int] = set()
        self.drifted = False
        self.changed = 0
        engine = self.start.engine
        self._alone = Engine(engine.model, engine.local, engine.seed, "loop")
        self._warm: dict[tuple[int, int | None], Tensor] = {}
        self._hold_samples()
        if self.shared:
            self.clients.append(replace(self.clients[0], id=SERVER))
            served = self.banks[:, 0].clone()
            self.states = [ClientState.of(served) for _ in range(setting.clients)]
            self.states.append(ClientState.of(self.banks[:, 0]))
            self.sit(SERVER)
        else:
            self.states = [ClientState.of(self.banks[:, i]) for i in range(setting.clients)]

    @property
    def models(self) -> int:
        """Count the models that a client keeps."""
        return len(self.banks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this run, once."""
        return notes_of(self.start, self.evaluator, self.models, self.diverged)

    # Rounds.

    def train(self, i: int, round: int) -> list[Message]:
        """Choose and train: the client's bank changes, and its messages are returned."""
        client, state = self.clients[i], self.states[i]
        if self.dry:
            empty = torch.empty(0)
            self.states[i] = replace(state, round=state.round + 1)
            return [] if self.silent else [Message(i, i % self.models, round, client.degree, empty)]
        needs = client.algorithm.needs
        if self.models == 1 and not client.algorithm.revives:
            needs = "nothing"
        choose = partial(self._choose, i, needs)
        task = Task(state.bank[:, None], self._samples[i], choose, state.round, needs, first=i)
        (done,) = self._alone.work(task, [0])
        assert done.vectors is not None  # not in place
        (choice,), (trained,) = done.choices, done.vectors
        self.states[i], messages = client.end_round(state, choice.cluster, trained)
        if self.states[i].trained is None:
            self.diverged.add(i)
        elif not self.shared:  # a server's client keeps nothing: the next download replaces all
            state.bank[choice.cluster].copy_(trained)
        self.changed += state.assignment is not None and state.assignment != choice.cluster
        return messages

    def _choose(self, i: int, needs: str, _: int, means: Tensor, samples: Tensor | None) -> Choice:
        """Let a client choose by its losses (m,), as far as its algorithm asks for them."""
        algorithm, now = self.setting.algorithm, self.states[i].round
        if needs != "nothing":
            self.seen[i] = float(means.nan_to_num(nan=float("inf")).min())
        elif algorithm.needs == "samples":
            samples = torch.zeros(1, self._samples[i].sizes[0])
        truth = self.clients[i].true_cluster if algorithm.informed else None
        return algorithm.choose(View(means, partial(stream, self.seed, "choose", i, now), samples, truth))

    def work(self, i: int) -> int:
        """Count the multiplications of a client's round: its losses (m n P), and three per step, sample and weight."""
        samples, local = self._samples[i].sizes[0], self.setting.local
        looked = 0 if self.setting.algorithm.needs == "nothing" or self.models == 1 else self.models * samples
        return (looked + 3 * local.steps * min(samples, local.batch_size or samples)) * self.size

    def sit(self, i: int) -> None:
        """Let a client sit a round out; the server always does: its own copy does not count."""
        self.states[i] = self.clients[i].skip_round(self.states[i])

    def fold(self, i: int, message: Message, weight: float) -> None:
        """Fold a message that its sender has checked."""
        if not self.dry:
            self.states[i] = self.clients[i].receive_(self.states[i], message, weight)

    def refuse(self, i: int, message: Message) -> None:
        """Hand a broken message to a client, which counts it."""
        if not self.dry:
            self.states[i] = self.clients[i].receive(self.states[i], message)

    # Relay.

    def offers(self, i: int) -> dict[int, Offer]:
        return {} if self.dry else self.clients[i].offers(self.states[i])

    def wants(self, i: int, cluster: int, offers: Sequence[Offer]) -> Offer | None:
        """Choose the copy of a cluster that a client asks for."""
        state = self.states[i]
        return self.clients[i].wants(state, cluster, offers, state.round - 1)

    def relay(self, i: int, message: Message) -> bool:
        """Take a copy that was asked for, if it is still worth it."""
        assert message.offer is not None
        if self.wants(i, message.cluster, [message.offer]) is None or not usable(message, self.states[i].bank):
            return False
        self.fold(i, message, 1.0)
        return True

    def take(self, i: int, message: Message) -> None:
        """Let a client without models fold one that it asked for, as an equal of the others that it asked for."""
        assert message.offer is not None
        self.fold(i, replace(message, offer=None, round=message.offer.stamp, sender=message.offer.origin), 1.0)

    # Banks.

    def empty(self, i: int) -> None:
        """Take all models away; the first that comes replaces nothing (a count of -1)."""
        state = self.states[i]
        self.bare.add(i)
        if not self.shared:
            state.bank.zero_()
        fresh = ClientState.of(state.bank)
        self.states[i] = replace(fresh, counts=(-1,) * self.models, round=state.round, rejected=state.rejected)

    def afresh(self, i: int) -> None:
        """Give a client that nobody can help the models that it would have begun with."""
        state = self.states[i]
        if self.dry:
            return
        if self.setting.algorithm.start == "elected":
            state.bank.copy_(self.warmed(i, None))
        else:
            state.bank.copy_(self.clients[i].start().bank)
        self.states[i] = replace(ClientState.of(state.bank), round=state.round, rejected=state.rejected)

    def settle(self, i: int) -> None:
        """Note that a client holds all models."""
        self.bare.discard(i)

    def jump(self, i: int, round: int) -> None:
        self.states[i] = replace(self.states[i], round=round)

    def copy(self, i: int, cluster: int, round: int) -> Message:
        """Hand out one model of a client as it is now, and how fresh it is."""
        state = self.states[i]
        offer = Offer(i, state.stamps[cluster], state.origins[cluster])
        model = torch.empty(0) if self.dry else state.bank[cluster].clone()
        return Message(i, cluster, round, self.clients[i].degree, model, offer, state.updates[cluster])

    def adopt(self, i: int, bank: Tensor, round: int) -> None:
        """Give a client the server's models."""
        self.states[i] = replace(self.states[i], bank=bank, round=round)

    def open_cluster(self, i: int, cluster: int, model: Tensor) -> None:
        """Write the model that opens a cluster to a client's bank; a bank that is too small grows, for everybody."""
        while cluster >= self.models:
            grown = torch.cat([self.banks, self.banks[:1]])  # elsewhere a twin that no one picks
            self.banks = grown
            for c, state in enumerate(self.states):
                later = state.with_model(len(grown) - 1, grown[:, c])
                counts = (*later.counts[:-1], -1 if c in self.bare else 0)
                self.states[c] = replace(later, counts=counts)
        state = self.states[i]
        state.bank[cluster].copy_(model)
        self.states[i] = state.with_model(cluster, state.bank)

    def elector(self, i: int, round: int | None = None, **options: Any) -> Elector:
        """Make a client's part in an election; round: in which it joins a by-election."""
        setting = self.setting
        return Elector(self.clients[i], setting.clusters, setting.algorithm.election, round=round, **options)

    def warmed(self, i: int, round: int | None) -> Tensor:
        """Compute the model (P,) with which a client stands in an election."""
        if (i, round) not in self._warm:
            self._warm[i, round] = self.elector(i, round).warm_up()
        return self._warm[i, round]

    def forget_warmed(self) -> None:
        """Let go of the warmed-up models: the election is over."""
        self._warm.clear()

    # The rest.

    def drift(self) -> None:
        """Let the clients hold their later samples."""
        assert self.setting.drift is not None
        self.drifted = True
        self.start.use_split(self.setting.drift[1])
        self.evaluator.use_split(self.setting.drift[1])
        self._hold_samples()

    def _hold_samples(self) -> None:
        train, truth = self.start.train, self.start.truth
        self._samples = []
        for i in range(self.setting.clients):
            x, y = train.of(i)
            self._samples.append(ClientData(x, y, (0, len(y))))
            told = None if truth is None else int(truth[i])
            self.clients[i] = replace(self.clients[i], x=x, y=y, true_cluster=told)

    def evaluate(self, ledger: Ledger, holding: Sequence[int]) -> dict[str, Any]:
        """Score everybody."""
        changed, self.changed = self.changed, 0
        if self.dry:
            return {}
        sent = (torch.tensor(ledger.sent_by_client), torch.tensor(ledger.sent_by_cluster))
        traffic = Traffic(*sent, ledger.server_models, ledger.start_models, ledger.scalars)
        return {
            "round": ledger.rounds_done,
            **self.evaluator.score_holders(self.banks, torch.full((self.setting.clients,), -1), holding),
            "changed": changed,
            **traffic.row(self.size * self.banks.element_size()),
            "election": None,
        }

    def pack(self, packer: Packer) -> dict[str, Any]:
        """Give everything that a checkpoint needs."""
        packer.tensors["bank"] = self.banks
        bare = torch.empty(0)
        states = self.states if self.shared else [replace(state, bank=bare) for state in self.states]
        facts = {name: getattr(self, name) for name in ("seen", "bare", "drifted", "changed", "_warm")}
        return {"states": packer.pack(states), "diverged": sorted(self.diverged), **packer.pack(facts)}

    def restore(self, packed: dict[str, Any], unpacker: Unpacker) -> None:
        """Continue from what `pack` gave."""
        packed = dict(packed)
        if packed["drifted"]:
            self.drift()
        self.banks = unpacker.tensors["bank"].to(self.banks.device, copy=True)
        self.diverged = set(packed.pop("diverged"))
        states = unpacker.unpack(packed.pop("states"))
        if self.shared:
            self.states = [*states[:-1], replace(states[-1], bank=self.banks[:, 0])]
        else:
            self.states = [replace(state, bank=self.banks[:, i]) for i, state in enumerate(states)]
        for name, value in packed.items():
            setattr(self, name, unpacker.unpack(value))
