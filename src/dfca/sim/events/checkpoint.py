"""How an event simulation is written to a checkpoint: the records of peers (`peer.packing`), books and links."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dfca.peer import packing
from dfca.sim.events import books, links

_KNOWN = {**packing.KNOWN, **packing.records_of((books, links))}


class Packer(packing.Packer):
    """Turns values into JSON; tensors go to `tensors` under names of their own, but views of `banks` do not."""

    def __init__(self, banks: Tensor | None = None) -> None:
        super().__init__(banks, _KNOWN)


class Unpacker(packing.Unpacker):
    """Turns what a `Packer` made back into values."""

    def __init__(self, tensors: Mapping[str, Tensor], banks: Tensor | None = None) -> None:
        super().__init__(tensors, banks, _KNOWN)
