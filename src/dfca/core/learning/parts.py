"""The parts of a model: a head, its last layers, and a body, all below; and how clients treat them.

A layer is what one module of the network holds: `2.weight` and `2.bias` are one. Running statistics belong to the body
unless a head that is named by its prefix takes them in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from dfca.base.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from dfca.core.algorithm import Algorithm
    from dfca.core.learning.params import FlatModel
    from dfca.core.method import LocalOptions

Part = Literal["all", "head", "body"]
PARTS: tuple[Part, ...] = ("all", "head", "body")


class Phase(NamedTuple):
    """Some of the local steps of a round: which part they train, and how many they are; None: `local.steps`."""

    part: Part = "all"
    steps: int | None = None


class Stage(NamedTuple):
    """A phase made ready: how to train, and the tensors of the model that stay as they are, by their places."""

    options: LocalOptions
    frozen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Layout:
    """Which columns of a model (P,) a client averages with whom.

    common: with every neighbour, of any cluster, and the same in all models of a client; indexed: with
    those that trained the same cluster; private: never, and they are not sent.
    """

    common: tuple[slice, ...]
    indexed: tuple[slice, ...]
    private: tuple[slice, ...]

    def spread_(self, bank: Tensor, cluster: int) -> None:
        """Write the common columns of one model of a client to all its models: bank (m, ..., P)."""
        for columns in self.common:
            bank[..., columns] = bank[cluster, ..., columns].clone()

    def hide(self, model: Tensor) -> Tensor:
        """Return a model (P,) without its private columns: zeros in their place."""
        if not self.private:
            return model
        model = model.clone()
        for columns in self.private:
            model[columns] = 0
        return model

    def fill(self, model: Tensor, own: Tensor) -> Tensor:
        """Return a model (P,) that came, with the private columns of one's own."""
        model = model.clone()
        for columns in self.private:
            model[columns] = own[columns]
        return model

    @property
    def kept(self) -> int:
        """Count the numbers of a model that are not sent."""
        return sum(columns.stop - columns.start for columns in self.private)


def head_tensors(model: FlatModel, head: int | str | re.Pattern[str]) -> list[bool]:
    """Find the tensors of the head, in the order of `model.names`: of the last `head` layers, with that prefix, or by a
    regular expression.

    Raises ModelError where the model has fewer layers, or no such names.
    """
    if isinstance(head, re.Pattern):
        is_head = [head.search(name) is not None for name in model.names]
        if not any(is_head) or all(is_head):
            which = "every" if any(is_head) else "no"
            raise ModelError(
                f"mixing.private: {head.pattern!r} is in the name of {which} tensor that the model trains or averages; "
                f"it has {', '.join(model.names)}"
            )
        return is_head
    if isinstance(head, str):
        is_head = [name == head or name.startswith(f"{head}." if head else "") for name in model.names]
        if not any(is_head):
            known = ", ".join(dict.fromkeys(_layer(name) or name for name in model.names))
            raise ModelError(f'the model has no layer "{head}" that could be its head; it has {known}')
        return is_head
    layers = list(dict.fromkeys(_layer(name) for name in model.names[: model.count]))
    if head > len(layers):
        raise ModelError(f"head must be <= {len(layers)}, the number of the model's layers, got {head}")
    last = set(layers[len(layers) - head :])
    return [place < model.count and _layer(name) in last for place, name in enumerate(model.names)]


def layout_of(model: FlatModel, algorithm: Algorithm) -> Layout | None:
    """Settle how the parts of a model are averaged; None where they are averaged alike.

    Raises ModelError where the head that the algorithm asks for leaves nothing to send.
    """
    if algorithm.head is None or (algorithm.body != "common" and not algorithm.private_head):
        return None
    heads = head_tensors(model, algorithm.head)
    head, body = _columns(model, heads), _columns(model, [not is_head for is_head in heads])
    if not algorithm.private_head:
        return Layout(body, head, ())
    if not body:
        raise ModelError(
            f"{algorithm.name} keeps the head of a model and sends its body, and this model is all head; "
            "give it a layer more, or a smaller head"
        )
    return Layout(body, (), head) if algorithm.body == "common" else Layout((), body, head)


def stages_of(model: FlatModel, algorithm: Algorithm, local: LocalOptions) -> tuple[Stage, ...]:
    """List what a client trains in a round, one after the other; local: its options, settled by `core.client`."""
    if not algorithm.schedule or algorithm.head is None:
        return (Stage(local),)
    heads = head_tensors(model, algorithm.head)
    frozen = {
        "all": frozenset[int](),
        "head": frozenset(place for place, is_head in enumerate(heads) if not is_head),
        "body": frozenset(place for place, is_head in enumerate(heads) if is_head),
    }
    return tuple(
        Stage(local if steps is None else replace(local, steps=steps, epochs=None), frozen[part])
        for part, steps in algorithm.schedule
    )


def cut(columns: Sequence[slice], block: slice) -> list[slice]:
    """Intersect columns with a block of them: [slice(2, 9)], slice(4, 20) -> [slice(4, 9)]."""
    parts = (slice(max(part.start, block.start), min(part.stop, block.stop)) for part in columns)
    return [part for part in parts if part.start < part.stop]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _columns(model: FlatModel, tensors: Sequence[bool]) -> tuple[slice, ...]:
    """Return where the numbers of some tensors stand, as few slices."""
    slices: list[slice] = []
    begin = 0
    for size, chosen in zip(model.sizes, tensors, strict=True):
        if chosen and slices and slices[-1].stop == begin:
            slices[-1] = slice(slices[-1].start, begin + size)
        elif chosen and size:
            slices.append(slice(begin, begin + size))
        begin += size
    return tuple(slices)
