"""What becomes of the models that a peer holds: taken, opened, merged. States are values; memory is the driver's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dfca.core.rules.merging import order_of
from dfca.core.rules.relay import Offer
from dfca.core.state import ClientState
from dfca.peer.records.lineage import Entry, Lineage, layout_of

Allocate = Callable[[int], Tensor]  # returns memory (m, P) for models; called again, the first rows hold what they held


def taken(models: Tensor, lineage: Lineage, round: int, allocate: Allocate) -> ClientState:
    """Return the state of a peer that begins a round with models (m, P) of a lineage."""
    bank = allocate(len(models))
    bank.copy_(models)
    return replace(ClientState.of(bank), round=round, assignment=None, closed=layout_of(lineage).closed)


def opened(copies: ClientState, slot: int, model: Tensor, allocate: Allocate) -> ClientState:
    """Put a model into a cluster that an election opened; the bank grows where it is new."""
    bank, before = copies.bank, len(copies.bank)
    if slot >= before:
        bank = allocate(slot + 1)
    for j in (*range(before, slot + 1), slot):
        bank[j].copy_(model)
        copies = copies.with_model(j, bank)
    return copies


def stamped(copies: ClientState, cluster: int, offer: Offer | None) -> ClientState:
    """Note how fresh a copy is that was taken over."""
    assert offer is not None
    stamps, origins = list(copies.stamps), list(copies.origins)
    stamps[cluster], origins[cluster] = offer.stamp, offer.origin
    return replace(copies, stamps=tuple(stamps), origins=tuple(origins))


def surveyed(copies: ClientState, entry: Entry, allocate: Allocate) -> tuple[ClientState, list[int]]:
    """Merge and close clusters as a survey decided; after the last survey, renumber those that are left.

    Returns the state, and which of the clusters are 0, 1, ... now.
    """
    after = copies.merged(entry.plan)
    if after.assignment in after.closed:
        after = replace(after, assignment=None)
    order = list(range(len(after.bank)))
    if entry.last:
        order = order_of(len(after.bank), after.closed)
        after = after.renumbered(order, len(after.bank) - len(after.closed))
    bank = allocate(len(after.bank))
    bank.copy_(after.bank)
    return replace(after, bank=bank), order[: len(bank)]
