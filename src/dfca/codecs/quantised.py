"""Quantised codecs: every number travels, with fewer bits.

bf16    rounded to 8 significant bits: half of the bytes of float32
int8    x ~ s q per block of `BLOCK` numbers, s = max |x| / 127, q = round(x / s): 3.8 times fewer bytes
1-bit   h <- a h + s sign(x - a h) at both ends, s = mean |x - a h| per block: 21 times fewer bytes. h begins as the
        own model at each end. a = `LEAK` < 1: a receiver that begins, misses a payload or comes later is off by a
        share a^n of it after n more
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dfca.core.codec import Codec, Context, Parts, Payload

BLOCK = 64
LEAK = 0.95
POWERS = 2 ** torch.arange(8, dtype=torch.uint8)


def bf16() -> Codec:
    """Round to bfloat16."""
    return Codec(
        "bf16",
        parts=lambda size: [(torch.bfloat16, size)],
        outgoing=lambda model, context: (model.bfloat16(),),
        incoming=lambda payload, own, context: payload[0].to(own.dtype),
    )


def int8() -> Codec:
    """Round to 8 bits, with a scale per block."""

    def outgoing(model: Tensor) -> Payload:
        blocks = _blocks(model)
        scales = blocks.abs().amax(dim=1) / 127
        units = torch.where(scales > 0, scales, 1.0)
        return (blocks / units[:, None]).round().clamp(-127, 127).to(torch.int8).view(-1)[: len(model)], scales

    def incoming(payload: Payload, own: Tensor) -> Tensor:
        return (_blocks(payload[0]) * payload[1][:, None]).view(-1)[: len(own)].to(own.dtype)

    return Codec(
        "int8",
        parts=lambda size: [(torch.int8, size), (torch.float32, -(-size // BLOCK))],
        outgoing=lambda model, context: outgoing(model),
        incoming=lambda payload, own, context: incoming(payload, own),
    )


def one_bit() -> Codec:
    """Send the signs of what receivers lack, with a scale per block."""

    def outgoing(model: Tensor, context: Context) -> Payload:
        lacking = _blocks(model - LEAK * (model if context.sent is None else context.sent))
        signs = (lacking > 0).view(-1, 8).to(torch.uint8)
        inside = _blocks(torch.ones_like(model)).sum(dim=1)
        return (signs * POWERS).sum(dim=1, dtype=torch.uint8), lacking.abs().sum(dim=1) / inside

    def incoming(payload: Payload, own: Tensor, context: Context) -> Tensor:
        signs = 2 * (payload[0][:, None] // POWERS % 2).view(-1, BLOCK).float() - 1
        gained = (payload[1][:, None] * signs).view(-1)[: len(own)].to(own.dtype)
        return LEAK * (own if context.received is None else context.received) + gained

    def parts(size: int) -> Parts:
        blocks = -(-size // BLOCK)
        return [(torch.uint8, blocks * BLOCK // 8), (torch.float32, blocks)]

    return Codec("1-bit", parts, outgoing, incoming, remembers=True)


def _blocks(model: Tensor) -> Tensor:
    """View a vector as float32 blocks (n, BLOCK), the last one filled with zeros."""
    return pad(model.float(), (0, -len(model) % BLOCK)).view(-1, BLOCK)
