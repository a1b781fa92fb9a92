"""Sparse codecs: a share of a model's numbers travels, the others stay as the receiver knows them.

  top-k     the numbers that differ most from what was sent last, |x - sent|: those that are left out add up until their
            turn comes (error feedback, as in CHOCO-SGD and in decentralizepy's partial sharing)
  random-k  k numbers drawn anew for every message

A receiver keeps what each sender has sent of a cluster, and takes its own numbers for the rest. What travels are values
and not differences: a receiver that misses a payload, or comes later, has nothing to repair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfca.core.codec import Codec, Context, Parts, Payload


def top_k(keep: float = 0.01) -> Codec:
    """Send the share `keep` of the numbers that have changed most since they were sent."""

    def outgoing(model: Tensor, context: Context) -> Payload:
        gap = model if context.sent is None else model - context.sent.nan_to_num()
        return _taken(model, gap.abs().topk(_count(len(model), keep)).indices)

    return Codec("top-k", lambda size: _parts(size, keep), outgoing, _put, remembers=True)


def random_k(keep: float = 0.01) -> Codec:
    """Send a share `keep` of the numbers, drawn anew for every message."""

    def outgoing(model: Tensor, context: Context) -> Payload:
        return _taken(model, torch.randperm(len(model), generator=context.random())[: _count(len(model), keep)])

    return Codec("random-k", lambda size: _parts(size, keep), outgoing, _put, remembers=True)


def _count(size: int, keep: float) -> int:
    return max(1, int(keep * size))


def _parts(size: int, keep: float) -> Parts:
    places = torch.int16 if size <= 2**15 else torch.int32
    return [(places, _count(size, keep)), (torch.float32, _count(size, keep))]


def _taken(model: Tensor, places: Tensor) -> Payload:
    places = places.sort().values
    return places.to(torch.int16 if len(model) <= 2**15 else torch.int32), model[places].float()


def _put(payload: Payload, own: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return the receiver's numbers with those of the sender in their places, and the latter; NaN: never sent."""
    kept = torch.full_like(own, torch.nan) if context.received is None else context.received.clone()
    kept[payload[0].long()] = payload[1].to(own.dtype)
    return torch.where(kept.isnan(), own, kept), kept
