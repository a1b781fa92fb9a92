"""What both simulators begin with: the architecture, the clients' samples, an engine, and banks of fresh models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dfca.core.client import effective
from dfca.core.election import Parts
from dfca.core.params import FlatModel, initial
from dfca.data.clients import ClientData, Split
from dfca.errors import ModelError
from dfca.sim.bank import Bank, BankSpec
from dfca.sim.engine import make_engine
from dfca.sim.setting import Setting, initial_module
from dfca.sim.shards import Alone, Shards, members_of


class Start:
    """A setting made ready on one rank.

    flat: the architecture; engine: how local work runs; train, test: the samples of the members of this rank; truth
    (N,): the true clusters of all clients, if known; shared: whether a server keeps one bank for all; storage: where
    the banks lie, once they are made.
    """

    def __init__(self, setting: Setting, shards: Shards | None = None) -> None:
        self.setting = setting
        self.shards: Shards = shards or Alone(setting.clients)
        self.members = self.shards.members
        self.shared = setting.algorithm.exchange == "server"
        self.storage: Bank | None = None
        with self.shards.agreed():
            self.flat = FlatModel(initial_module(setting).to(setting.dtype)).to(setting.device)
            self.use_split(setting.split)
            self._check_outputs()
            local = effective(setting.local, setting.algorithm)
            self.engine = make_engine(setting.engine, self.flat, local, setting.seed, self.train, setting.device)

    def use_split(self, split: Split) -> None:
        """Take the members' samples from a split: the first one, or the one that a drift brings."""
        device, dtype = self.setting.device, self.setting.dtype
        self.train, self.test = (members_of(data, self.members).to(device, dtype) for data in (split.train, split.test))
        self.truth = split.clusters

    def initial_model(self) -> Tensor:
        """Draw the model (P,) from which all clients warm up for an election."""
        setting = self.setting
        return initial(self.flat, setting.make_model, setting.seed, "init", 0).to(setting.device)

    def drawn_models(self) -> int:
        """Count the models that a client begins with where they are drawn, not elected."""
        clusters, algorithm = self.setting.clusters, self.setting.algorithm
        if clusters is None or algorithm.informed:
            clusters = self.setting.true_clusters
        return algorithm.bank_size(clusters)

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
                    data_bytes=sum(t.numel() * t.element_size() for t in (self.train.x, self.test.x)),
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
        return banks

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


def take_parts(data: ClientData, clients: Sequence[int], parts: Sequence[Parts], name: str) -> ClientData:
    """Copy one part of the samples of some clients."""
    if not clients:
        return data.subset(())
    rows = [getattr(part, name).to(data.y.device) for part in parts]
    pieces = [data.of(i) for i in clients]
    x = torch.cat([x[mine] for (x, _), mine in zip(pieces, rows, strict=True)])
    y = torch.cat([y[mine] for (_, y), mine in zip(pieces, rows, strict=True)])
    return ClientData(x, y, tuple(accumulate((len(mine) for mine in rows), initial=0)))
