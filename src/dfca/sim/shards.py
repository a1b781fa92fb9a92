"""Who holds which clients: the seam between the simulator and the processes that it runs in.

The simulator is written once, for a rank that holds the clients `members` and exchanges with the others by the few
calls of `Shards`. `Alone` is one process that holds all clients: nothing travels. `sim.rounds.ranks` has the other one.
What all clients know is small (assignments, scores, votes) and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dfca.base.errors import DfcaError
from dfca.core.rules.mixing import CORE_BYTES, blocks
from dfca.data.clients import ClientData, Split
from dfca.sim.local.cores import each, even

T = TypeVar("T")


class AgreedError(DfcaError):
    """What went wrong on one rank, raised on every one."""


PIECE_BYTES = 4 * 2**20  # what is copied, sent or written at once: large enough for full speed, small beside any bank
CORES_FROM = 512 * 2**20  # bytes of models in a round from which on every core mixes blocks of its own


class ExchangePlan(NamedTuple):
    """What travels of one cluster: needs[r] (S_r,) are the clients, sorted, whose models rank r mixes."""

    cluster: int
    needs: Sequence[Tensor]


Mix = Callable[[int, slice, Tensor], None]
"""Mixes a block: which plan, its columns, the rows that this rank mixes (S, w), which are a snapshot."""


class Shards(Protocol):
    """The clients of a rank, and its exchange with the others. All ranks make the same calls in the same order."""

    rank: int
    ranks: int
    neighbours: int  # ranks on this machine
    members: range

    def of_rank(self, rank: int) -> range:
        """Return the clients of a rank."""

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all clients: the members' (L, ...) -> (N, ...), on the CPU."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks; it may be written."""

    def broadcast(self, vector: Tensor, client: int) -> Tensor:
        """Send every rank the vector of the one that holds a client; the others pass one of the same shape."""

    def share(self, value: Any) -> Any:
        """Send every rank the first rank's value, which JSON can hold."""

    def either(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""

    def agreed(self) -> AbstractContextManager[None]:
        """Raise AgreedError on every rank if the block fails on one; no calls of `Shards` inside."""

    def order(self, need: Tensor) -> Tensor:
        """Put the clients whose models this rank mixes into the order in which `exchange` passes their rows."""

    def exchange(self, banks: Tensor, plans: Sequence[ExchangePlan], mix_: Mix) -> None:
        """Send the models of each plan, a block of columns at a time, and call `mix_` on each; banks (m, L, P)."""

    def collect(self, banks: Tensor) -> Iterator[Tensor]:
        """Yield all rows of all banks in order (cluster, client) as pieces on the CPU, on the first rank alone."""

    def spread_(self, bank: Tensor | None, banks: Tensor) -> None:
        """Write the members' rows of a whole bank (m, N, P), which the first rank has, to banks (m, L, P)."""

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Send every rank the first rank's small tensors."""


class Alone:
    """One process holds all clients; `Shards` says what the methods do."""

    rank, ranks, neighbours = 0, 1, 1

    def __init__(self, clients: int) -> None:
        self.members = range(clients)

    def of_rank(self, rank: int) -> range:
        return self.members

    def gather(self, rows: Tensor) -> Tensor:
        return rows.cpu()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, vector: Tensor, client: int) -> Tensor:
        return vector

    def share(self, value: Any) -> Any:
        return value

    def either(self, flag: bool) -> bool:
        return flag

    def agreed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def order(self, need: Tensor) -> Tensor:
        return need

    def exchange(self, banks: Tensor, plans: Sequence[ExchangePlan], mix_: Mix) -> None:
        # blocks of large banks fit the cache of a core, and every core mixes its own
        sources = [plan.needs[0].to(banks.device) for plan in plans]
        row_bytes = banks.shape[1] * banks.element_size()
        large = banks.device.type == "cpu" and len(plans) * row_bytes * banks.shape[2] >= CORES_FROM
        cuts = blocks(banks.shape[2], row_bytes, CORE_BYTES if large else PIECE_BYTES)
        tasks = list(product(range(len(plans)), cuts))

        def work(some: slice) -> None:
            taken = banks.new_empty(0)  # new memory for every block takes a fifth longer
            for number, columns in tasks[some]:
                models = banks[plans[number].cluster, :, columns]
                torch.index_select(models, 0, sources[number], out=taken.resize_(0))
                mix_(number, columns, taken)

        workers = torch.get_num_threads() if large else 1
        for _ in each((partial(work, some) for some in even(len(tasks), 4 * workers if large else 1)), workers):
            pass

    def collect(self, banks: Tensor) -> Iterator[Tensor]:
        return pieces(banks)

    def spread_(self, bank: Tensor | None, banks: Tensor) -> None:
        assert bank is not None
        for to, row in zip(banks, bank, strict=True):
            to.copy_(row)

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        return dict(tensors or {})


def pieces(banks: Tensor) -> Iterator[Tensor]:
    """Cut banks (m, L, P) into runs of rows, in order, copied to the CPU where they are not there."""
    rows = max(1, PIECE_BYTES // max(1, banks.shape[2] * banks.element_size()))
    for models in banks:
        for some in models.split(rows):
            yield some.cpu()


def members_of(data: ClientData, members: range) -> ClientData:
    """View the samples of consecutive clients; also of data that `keep` left."""
    if len(members) == data.clients:
        return data
    begin, end = data.offsets[members.start], data.offsets[members.stop]
    offsets = tuple(offset - begin for offset in data.offsets[members.start : members.stop + 1])
    return replace(data, x=data.x[begin:end], y=data.y[begin:end], offsets=offsets)


def portions(things: Sequence[T], vector_bytes: int) -> Iterator[Sequence[T]]:
    """Cut things into runs whose vectors, of that many bytes each, take 16 PIECE_BYTES at most."""
    size = max(1, 16 * PIECE_BYTES // max(1, vector_bytes))
    return (things[begin : begin + size] for begin in range(0, len(things), size))


def samples_of(data: ClientData, places: Sequence[int]) -> ClientData:
    """Take the samples of some members: a view where they follow one another."""
    run = range(places[0], places[-1] + 1)
    return members_of(data, run) if len(run) == len(places) else data.subset(places)


def keep(split: Split, members: range) -> Split:
    """Copy a split without the samples of clients of other ranks; their numbers of samples stay known."""
    if len(members) == split.train.clients:
        return split

    def cut(data: ClientData) -> ClientData:
        begin, mine = data.offsets[members.start], members_of(data, members)
        offsets = tuple(offset - begin for offset in data.offsets)
        return replace(mine, x=mine.x.clone(), y=mine.y.clone(), offsets=offsets)

    return replace(split, train=cut(split.train), test=cut(split.test))


def is_in(share: range, clients: Tensor) -> Tensor:
    """Return which of some clients are in a share: (C,) bool."""
    return (clients >= share.start) & (clients < share.stop)


def within(members: range, clients: Sequence[int]) -> list[int]:
    """Find those of some clients that are members, as positions among the members."""
    return [client - members.start for client in clients if client in members]
