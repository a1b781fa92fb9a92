"""What travels in place of a model: a record of two pure functions, and the checks around them.

  outgoing(model, context) -> payload        at the sender, once for all its neighbours
  incoming(payload, own, context) -> update  at each receiver; own is its copy of the same cluster, before it is folded

A payload is a tuple of tensors whose types and lengths `parts` declares for a model of P floats: that is its size in
bytes, and all that a receiver believes. What a sender had to leave out it may send later (error feedback):
`context.sent` is what receivers have of its model so far. Payloads can be lost, and receivers can come later: a codec
must not need every payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfca.base.errors import ConfigError, place_of

NORM_FACTOR = 1e3
"""A model that is this many times as large as the receiver's own is no model."""
Payload = tuple[Tensor, ...]
Parts = Sequence[tuple[torch.dtype, int]]


class Context(NamedTuple):
    """What a codec sees besides the model.

    Attributes:
        random: Opens the random stream of this client, cluster and round; the sender's at both ends.
        sent: At the sender, what a receiver of all payloads of this cluster has; None: none was sent.
        received: At a receiver, what the last payload of this sender and cluster has left; None: none came.
    """

    random: Callable[[], torch.Generator]
    sent: Tensor | None = None
    received: Tensor | None = None


@dataclass(frozen=True)
class Codec:
    """How models are made smaller before they leave, and what receivers make of them.

    Attributes:
        name: For errors and notes.
        parts: The types and lengths of the tensors of a payload, by P.
        outgoing: Makes the payload from a model (P,).
        incoming: Makes a model (P,) from a payload, and the receiver's own copy (P,); or a pair, the model and what is
            remembered in its place.
        remembers: Whether what was sent and received last is kept for it: one tensor per neighbour and cluster.

    Example:
        >>> import dfca, torch
        >>> half = dfca.Codec(
        ...     "half",
        ...     parts=lambda size: [(torch.float16, size)],
        ...     outgoing=lambda model, context: (model.half(),),
        ...     incoming=lambda payload, own, context: payload[0].to(own.dtype),
        ... )
        >>> half.bytes(1000)
        2000
    """

    name: str
    parts: Callable[[int], Parts]
    outgoing: Callable[[Tensor, Context], Payload]
    incoming: Callable[[Payload, Tensor, Context], Tensor | tuple[Tensor, Tensor]]
    remembers: bool = False

    def bytes(self, size: int) -> int:
        """Count the bytes of a payload.

        Args:
            size: P, the floats of a model.

        Returns:
            The declared size.
        """
        return sum(dtype.itemsize * length for dtype, length in self.declared(size))

    def declared(self, size: int) -> list[tuple[torch.dtype, int]]:
        """List the parts of a payload.

        Args:
            size: P, the floats of a model.

        Returns:
            Their types and lengths.

        Raises:
            ConfigError: If `parts` fails, or declares something else.
        """
        parts: list[tuple[torch.dtype, int]] = []
        for part in _call(self, "parts", lambda: list(self.parts(size))):
            match part:
                case (torch.dtype() as dtype, int(length)) if length >= 0:
                    parts.append((dtype, length))
                    continue
            raise ConfigError(
                f"parts of codec {self.name} must list pairs of a torch.dtype and a length >= 0, such as "
                f"(torch.float32, {size}), got {part!r}"
            )
        return parts


class BadPayload(ValueError):
    """A payload that does not become a model."""


def encode(codec: Codec, model: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Make the bytes (B,) of a model (P,); returns them, and what a receiver of all payloads remembers.

    Raises ConfigError where the codec does not keep to what it declares.
    """
    model = model.detach().cpu()
    payload = _call(codec, "outgoing", codec.outgoing, model.clone(), context)
    data = join(codec, payload, len(model))
    try:
        return data, decode(codec, data, model, Context(context.random, received=context.sent))[1]
    except BadPayload as error:
        raise ConfigError(str(error)) from None


def decode(codec: Codec, data: Tensor, own: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Make a model (P,) from bytes that came, and what is remembered of it. Raises BadPayload, whatever they are."""
    if data.dtype != torch.uint8 or data.shape != (codec.bytes(own.numel()),):
        raise BadPayload(f"a payload of {codec.name} has {codec.bytes(own.numel())} bytes, got {tuple(data.shape)}")
    payload, at = [], 0
    for dtype, length in codec.declared(own.numel()):
        end = at + dtype.itemsize * length
        payload.append(data[at:end].clone().view(dtype))
        at = end
    if not all(bool(torch.isfinite(part).all()) for part in payload if part.is_floating_point()):
        raise BadPayload(f"a payload of {codec.name} has a number that is not finite")
    home = own.detach().cpu()
    try:
        update = codec.incoming(tuple(payload), home.clone(), context)
    except Exception as error:
        raise BadPayload(
            f"incoming of codec {codec.name} failed with {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    update, kept = update if isinstance(update, tuple) and len(update) == 2 else (update, update)
    if not isinstance(update, Tensor) or update.shape != own.shape or not update.is_floating_point():
        got = f"{tuple(update.shape)} of {update.dtype}" if isinstance(update, Tensor) else type(update).__name__
        raise BadPayload(f"incoming of codec {codec.name} must return {tuple(own.shape)} of {own.dtype}, got {got}")
    if not bool(torch.isfinite(update).all()):
        raise BadPayload(f"incoming of codec {codec.name} returned a number that is not finite")
    if float(update.norm()) > (most := NORM_FACTOR * max(1.0, float(home.norm()))):
        raise BadPayload(
            f"incoming of codec {codec.name} returned a model of norm {float(update.norm()):.3g} > {most:.3g}"
        )
    return update.to(own), kept if isinstance(kept, Tensor) else update


def join(codec: Codec, payload: Any, size: int) -> Tensor:
    """Join the tensors of a payload to bytes (B,). Raises ConfigError where they are not as declared."""
    declared = codec.declared(size)
    if not isinstance(payload, tuple) or not all(isinstance(part, Tensor) for part in payload):
        kind = type(payload).__name__
        raise ConfigError(f"outgoing of codec {codec.name} must return a tuple of tensors, got {kind}")
    made = sum(part.dtype.itemsize * prod(part.shape) for part in payload)
    if made > codec.bytes(size):
        raise ConfigError(
            f"outgoing of codec {codec.name} returned {made} bytes, and declares {codec.bytes(size)} for a model of "
            f"{size} floats; declare them in parts"
        )
    shapes = [(part.dtype, part.numel()) for part in payload]
    if shapes != declared:
        raise ConfigError(f"outgoing of codec {codec.name} declares parts {declared} and returned {shapes}")
    if not all(bool(torch.isfinite(part).all()) for part in payload if part.is_floating_point()):
        raise ConfigError(f"outgoing of codec {codec.name} returned a number that is not finite")
    return torch.cat([part.detach().cpu().contiguous().view(-1).view(torch.uint8) for part in payload])


def _call(codec: Codec, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} of codec {codec.name} failed with {type(error).__name__}: {error}{place_of(error)}"
        ) from error
