"""Clients that lie, as a part of a simulated world: who they are, and what they send in place of what they hold.

  flip-signs    sends -theta for theta
  noise         sends theta plus Gaussian noise of standard deviation `scale`
  swap-labels   trains on labels y' = classes - 1 - y, and sends what comes of it
  stale         sends the first model that it trained, for ever
  self-vote     claims in elections that its own model fits its samples without loss, and that every other one does not
                fit at all: so it bids highest and votes for nobody else

A liar keeps and trains honest copies: only what leaves it is a lie. It lies about its updates, about copies that others
ask it for, and (`flip-signs`, `noise`) about the model that it stands for election with; models of others that an
election passes through it are handed on as they are. Who lies is drawn by the seed. Scores are those of the honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dfca.core.rng import stream
from dfca.data.clients import ClientData
from dfca.sim.local.choices import LiarOptions

CLAIMED_LOSS = 100.0  # what a `self-vote` claims every model but its own to cost per sample
START = -1  # the round of a model that is warmed up for the first election


class Liars:
    """The liars of a run."""

    def __init__(self, options: LiarOptions, clients: int, seed: int) -> None:
        order = torch.randperm(clients, generator=stream(seed, "liars")).tolist()
        count = min(clients - 1, round(options.share * clients))
        self.options, self.kind, self.seed = options, options.kind, seed
        self.ids = sorted(order[:count])
        self.honest = sorted(order[count:])
        self.stale: dict[int, Tensor] = {}  # the first models that they sent
        self._known = frozenset(self.ids)
        self._drawn: tuple[int, dict[tuple[int, int], Tensor]] = (START, {})

    def __contains__(self, client: int) -> bool:
        return client in self._known

    @property
    def lie_about_models(self) -> bool:
        """Whether what they send is not what they hold."""
        return bool(self.ids) and self.kind in ("flip-signs", "noise", "stale")

    @property
    def lie_about_losses(self) -> bool:
        """Whether they lie in elections."""
        return bool(self.ids) and self.kind == "self-vote"

    def note_first(self, client: int, model: Tensor) -> None:
        """Take in that a liar has trained a model (P,), which it is about to send."""
        if self.kind == "stale" and client not in self.stale:
            self.stale[client] = model.clone()

    def tell(self, client: int, cluster: int, now: int, model: Tensor) -> Tensor:
        """Make what a client sends in place of a model (P,) in a round; the model itself where it does not lie."""
        if client not in self or not self.lie_about_models:
            return model
        told = model.clone()
        self._tell_(told, slice(None), (client, cluster, now), len(model))
        return told

    def tell_(self, rows: Tensor, senders: Sequence[int], cluster: int, now: int, columns: tuple[slice, int]) -> None:
        """Replace in place what liars among the senders send: rows (S, w), which are these columns of models of P."""
        for row, client in zip(rows, senders, strict=True):
            if client in self:
                self._tell_(row, columns[0], (client, cluster, now), columns[1])

    def _tell_(self, row: Tensor, columns: slice, what: tuple[int, int, int], size: int) -> None:
        client, cluster, now = what
        if self.kind == "flip-signs":
            row.neg_()
        elif self.kind == "noise":
            row.add_(self._noise(client, cluster, now, row.new_empty(size))[columns], alpha=self.options.scale)
        elif self.kind == "stale" and client in self.stale:
            row.copy_(self.stale[client][columns])

    def tell_warm(self, client: int, stage: int | None, model: Tensor) -> Tensor:
        """Make the model (P,) that a client stands for election with; `stale` liars have sent nothing before."""
        return model if self.kind == "stale" else self.tell(client, START, START if stage is None else stage, model)

    def _noise(self, client: int, cluster: int, now: int, like: Tensor) -> Tensor:
        """Draw the noise of a message; that of a round is kept, for models are sent in blocks."""
        if self._drawn[0] != now:
            self._drawn = (now, {})
        known = self._drawn[1]
        if (client, cluster) not in known:
            drawn = torch.randn(len(like), generator=stream(self.seed, "lie", client, cluster, now))
            known[client, cluster] = drawn.to(like)
        return known[client, cluster]

    def claim_(self, losses: Tensor, own: Sequence[bool]) -> None:
        """Replace in place the losses (c, n) of models by what a `self-vote` claims; own: which of them are its own."""
        losses.fill_(CLAIMED_LOSS)
        losses[torch.tensor(own, dtype=torch.bool, device=losses.device)] = 0.0

    def poison(self, data: ClientData, classes: int) -> ClientData:
        """Swap the labels of those that train on wrong ones."""
        if self.kind != "swap-labels":
            return data
        y = data.y.clone()
        for client in self.ids:
            rows = slice(data.offsets[client], data.offsets[client + 1])
            y[rows] = classes - 1 - y[rows]
        return replace(data, y=y)
