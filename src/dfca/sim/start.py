"""What both simulators begin with: the architecture, the clients' samples, an engine, and banks of fresh models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dfca.base.errors import ConfigError, ModelError, place_of
from dfca.core.algorithm import Choice, View
from dfca.core.client import effective
from dfca.core.learning.inputs import join
from dfca.core.learning.local import held_out
from dfca.core.learning.params import FlatModel, initial
from dfca.core.learning.parts import layout_of, stages_of
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split
from dfca.sim.liars import Liars
from dfca.sim.local.bank import Bank, BankSpec
from dfca.sim.local.engine import make_engine
from dfca.sim.setting import Setting, initial_module
from dfca.sim.shards import Alone, Shards, members_of


class Start:
    """A setting made ready on one rank; `train`, `test` and `held` are samples of the members of this rank."""

    def __init__(self, setting: Setting, shards: Shards | None = None, hold_out: bool = False) -> None:
        self.setting, self.hold_out = setting, hold_out
        self._divided: tuple[ClientData, ClientData] | None = None
        self.shards: Shards = shards or Alone(setting.clients)
        self.members = self.shards.members
        self.shared = setting.algorithm.exchange == "server"  # a server keeps one bank for all
        self.storage: Bank | None = None  # where the banks lie, once they are made
        self.liars = None if setting.liars is None else Liars(setting.liars, setting.clients, setting.seed)
        if self.liars is not None and self.shards.ranks > 1:
            raise ConfigError("an experiment with [liars] runs in one process; start it without torchrun")
        with self.shards.agreed():
            self.flat = FlatModel(initial_module(setting).to(setting.dtype), setting.learns).to(setting.device)
            self.use_split(setting.split)
            self._check_outputs()
            local = effective(setting.local, setting.algorithm)
            planned = bool(setting.algorithm.schedule) or setting.algorithm.trains == "all"
            if local.keeps_state and (planned or self.shards.ranks > 1):
                raise ConfigError(
                    'local.optimizer_state = "kept" is for one process and for methods that train one whole model, got '
                    f'{setting.algorithm.name} and {self.shards.ranks} processes; set it to "fresh"'
                )
            self.engine = make_engine(setting.engine, self.flat, local, setting.seed, self.train, setting.device)
            self.layout = layout_of(self.flat, setting.algorithm)  # which parts of a model are averaged with whom
            self.stages = stages_of(self.flat, setting.algorithm, local) if planned else None
            self.memory = self._first_memory()  # (N, w): what all clients remember

    def use_split(self, split: Split) -> None:
        """Take the members' samples from a split: the first one, or the one that a drift brings."""
        device, dtype = self.setting.device, self.setting.dtype
        train = split.train if self.liars is None else self.liars.poison(split.train, split.classes)
        self._all, self.test = (members_of(data, self.members).to(device, dtype) for data in (train, split.test))
        self.truth, self._divided = split.clusters, None
        self._divide()

    def hold(self, out: bool) -> None:
        """Hold samples out of training from now on, or train on all of them."""
        if self.hold_out != out:
            self.hold_out = out
            self._divide()

    def _divide(self) -> None:
        self.train: ClientData = self._all
        self.held: ClientData | None = None  # held out of training (`held_out`); None where `train` has all
        if self.hold_out:
            self.train, self.held = self.divided
        self._divided = self._divided if self.hold_out else None

    @property
    def divided(self) -> tuple[ClientData, ClientData]:
        """The samples that members train on while they hold some out, and those that they hold out."""
        if self._divided is None:
            first = self.members.start
            drawn = [held_out(size, self.setting.seed, first + i) for i, size in enumerate(self._all.sizes)]
            clients, seen = range(self._all.clients), [~mask for mask in drawn]
            self._divided = take_rows(self._all, clients, seen), take_rows(self._all, clients, drawn)
        return self._divided

    def initial_model(self) -> Tensor:
        """Draw the model (P,) from which all clients warm up for an election."""
        setting = self.setting
        return initial(self.flat, setting.make_model, setting.seed, "init", 0).to(setting.device)

    def choose(self, client: int, round: int, means: Tensor, samples: Tensor | None, many: int) -> Choice:
        """Choose the model that a client trains in a round by its mean losses (m,), and those of its samples (m, n)
        where it looked at them; many: how many it trains on."""
        algorithm, seed, truth, memory = self.setting.algorithm, self.setting.seed, None, None
        if algorithm.informed:
            assert self.truth is not None  # Setting checked it
            truth = int(self.truth[client])
        if samples is None and algorithm.needs == "samples":
            samples = torch.zeros(1, many, device=self.setting.device)
        if self.memory is not None:
            memory = self.memory[client]
        return algorithm.decide(View(means, partial(stream, seed, "choose", client, round), samples, truth, memory))

    def drawn_models(self) -> int:
        """Count the models that a client begins with where they are drawn, not elected."""
        clusters, algorithm = self.setting.clusters, self.setting.algorithm
        if clusters is None or algorithm.informed:
            clusters = self.setting.true_clusters
        return algorithm.bank_size(clusters)

    def _first_memory(self) -> Tensor | None:
        memory, clients = self.setting.algorithm.memory, self.setting.clients
        return None if memory is None else memory(self.drawn_models(), clients).repeat(clients, 1)

    def forget(self, client: int) -> None:
        """Let a client remember what it did at first."""
        if self.memory is not None and 0 <= client < len(self.memory):
            first = self._first_memory()
            assert first is not None
            self.memory[client] = first[client]

    @property
    def sent_size(self) -> int:
        """Count the numbers of a model that are sent."""
        return self.flat.size - (0 if self.layout is None else self.layout.kept)

    @property
    def payload_bytes(self) -> int | None:
        """The bytes of a codec's payload; None: models travel as they are."""
        codec = self.setting.codec
        return None if codec is None else codec.bytes(self.flat.size)

    def make_banks(self, models: int, most: int | None = None) -> Tensor:
        """Make room for banks (m, L, P), or (m, 1, P) where a server keeps one, and for up to `most` models later."""
        setting = self.setting
        rows = 1 if self.shared else len(self.members)
        with self.shards.agreed():
            self.storage = Bank(
                BankSpec(
                    shape=(models, rows, self.flat.size),
                    most=most or models,
                    dtype=setting.dtype,
                    device=setting.device,
                    place=setting.bank,
                    folder=setting.bank_folder,
                    data_bytes=self.train.nbytes + self.test.nbytes,
                    sharers=self.shards.neighbours,
                )
            )
            return self.storage.open(models)

    def draw_banks(self, models: int, most: int | None = None) -> Tensor:
        """Draw banks: every client its own models where the algorithm says so, else the same for all."""
        setting, banks = self.setting, self.make_banks(models, most)
        for j in range(models):
            if setting.algorithm.start != "own":
                banks[j] = initial(self.flat, setting.make_model, setting.seed, "init", j)
                continue
            for row, client in enumerate(range(1) if self.shared else self.members):
                banks[j, row] = initial(self.flat, setting.make_model, setting.seed, "init", j, client)
        if self.layout is not None:
            self.layout.spread_(banks, 0)
        return banks

    def _check_outputs(self) -> None:
        """Raise ModelError unless the model maps samples of this data to what their task wants."""
        x, y = self.train.of(0)
        vector = self.flat.flatten(initial_module(self.setting).to(self.setting.dtype)).to(self.setting.device)
        try:
            with torch.no_grad():
                outputs = self.flat.run(self.flat.pieces(vector), x[:2], "score")
        except Exception as error:  # a user's own module
            kind = "" if isinstance(error, RuntimeError | ValueError | TypeError) else f"{type(error).__name__}: "
            where = f"the model cannot take samples of shape {self.train.shape}"
            raise ModelError(f"{where}: {kind}{error}{place_of(error)}") from error
        self.flat.task.check(outputs, y[:2], self.setting.split.classes)
        self.flat.task.metric.score(outputs[None], y[None, :2])  # one of the user's own may fail


def take_rows(data: ClientData, clients: Sequence[int], rows: Sequence[Tensor]) -> ClientData:
    """Copy some samples of some clients: masks or indices, one tensor per client."""
    if not clients:
        return data.subset(())
    pieces, rows = [data.stored(i) for i in clients], [mine.to(data.y.device) for mine in rows]
    x = join([x[mine] for (x, _), mine in zip(pieces, rows, strict=True)])
    y = torch.cat([y[mine] for (_, y), mine in zip(pieces, rows, strict=True)])
    counts = (int(mine.sum()) if mine.dtype == torch.bool else len(mine) for mine in rows)
    return replace(data, x=x, y=y, offsets=tuple(accumulate(counts, initial=0)))
