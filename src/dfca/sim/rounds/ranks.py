"""One simulation in several processes, on `torch.distributed`: `torchrun --nproc-per-node W -m dfca run EXPERIMENT`.

Each rank holds the banks and samples of its share of the clients and does their local work. Models that a neighbour on
another rank mixes travel in blocks of columns, the next one while the last one is mixed; all else is small.
The numbers are those of one process up to float rounding: sums over ranks are added in another order.

A rank that is gone closes its connections, and every call of the others that waits for it raises `RankLost`; a machine
that is silent for `TIMEOUT` counts as gone. A rank that fails leaves its error in the store of the launcher, if it has
one. gloo rarely keeps waiting for a rank that was killed: under torchrun, `Watchdog` leaves such a call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from dfca.base.errors import ConfigError, DfcaError, RankLost
from dfca.core.rules.mixing import blocks
from dfca.sim.local.cores import share_out, usable_cores
from dfca.sim.rounds.watchdog import Watchdog
from dfca.sim.shards import PIECE_BYTES, AgreedError, ExchangePlan, Mix, is_in, pieces

TIMEOUT = timedelta(minutes=30)  # how long a rank may wait for another one: longer than the slowest of them works alone


def launched() -> bool:
    """Return whether torchrun, or another launcher with its variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def my_rank() -> int:
    """Return the rank of this process, 0 where it is alone."""
    return int(os.environ["RANK"]) if launched() else 0


def threads_of_rank() -> int | None:
    """Share the cores of this machine out among its ranks; None where there is one process."""
    if not launched():
        return None
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the other ranks, and leave them at the end. Raises RankLost if they cannot be reached, or do not come."""
    with _watchdog if "TORCHELASTIC_RUN_ID" in os.environ else nullcontext():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        _call(dist.init_process_group, backend, timeout=TIMEOUT)
        try:
            yield
            _call(dist.barrier)  # nobody leaves while others still work: to them it would look lost
        except RankLost:
            _watchdog.expire()
            raise
        except BaseException as error:
            with suppress(Exception):
                _store().set(_key(dist.get_rank()), " ".join(str(error).split()) or type(error).__name__)
            raise
        finally:
            with _watchdog.calling():
                dist.destroy_process_group()


def my_device(device: str) -> str:
    """Return the device of this rank: every rank has its own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and launched() else device


class _Route(NamedTuple):
    """Whose models of a cluster go where."""

    kept: Tensor  # rows for this rank itself
    sent: Tensor  # rows for the others in turn
    counts: list[int]  # how many of them to every rank
    given: list[int]  # how many come from every rank


class _UnderWay(NamedTuple):
    """A block that is being exchanged; what goes out must live until it has arrived."""

    number: int
    columns: slice
    incoming: Tensor
    work: Any
    outgoing: Tensor


class Ranks:
    """The clients shared out over the ranks of `torch.distributed`; see `Shards`."""

    def __init__(self, clients: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if clients < self.ranks:
            raise ConfigError(f"clients must be >= the {self.ranks} ranks, got {clients}; start fewer ranks")
        self._shares = share_out(clients, self.ranks)
        self.members = self._shares[self.rank]

    def of_rank(self, rank: int) -> range:
        return self._shares[rank]

    def gather(self, rows: Tensor) -> Tensor:
        longest = max(len(share) for share in self._shares)
        kind = torch.uint8 if rows.dtype == torch.bool else rows.dtype
        mine = torch.zeros(longest, *rows.shape[1:], dtype=kind)
        mine[: len(rows)] = rows
        everywhere = [torch.empty_like(mine) for _ in self._shares]
        _call(dist.all_gather, everywhere, mine)
        received = [part[: len(share)] for part, share in zip(everywhere, self._shares, strict=True)]
        return torch.cat(received).to(rows.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        _call(dist.all_reduce, tensor)
        return tensor

    def broadcast(self, vector: Tensor, client: int) -> Tensor:
        owner = next(rank for rank, share in enumerate(self._shares) if client in share)
        vector = vector.contiguous()
        _call(dist.broadcast, vector, owner)
        return vector

    def share(self, value: Any) -> Any:
        return json.loads(self._share_bytes(json.dumps(value).encode()))

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        packed = safetensors.torch.save({name: t.cpu().contiguous() for name, t in (tensors or {}).items()})
        return safetensors.torch.load(self._share_bytes(packed))

    def either(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor([int(flag)])))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        failed = self.gather(torch.full((len(self.members),), problem is not None)).nonzero()[:, 0].tolist()
        if not failed:
            return
        owner = next(rank for rank, share in enumerate(self._shares) if failed[0] in share)
        named = "" if isinstance(problem, DfcaError) else f"{type(problem).__name__}: "
        message = [named + " ".join(str(problem).split()), getattr(problem, "status", 1)]
        text, status = json.loads(self._share_bytes(json.dumps(message).encode(), owner))
        agreed = AgreedError(text)
        agreed.status = status
        raise agreed from problem

    def order(self, need: Tensor) -> Tensor:
        here = is_in(self.members, need)
        return torch.cat([need[here], need[~here]])  # this rank's own clients come first

    def exchange(self, banks: Tensor, plans: Sequence[ExchangePlan], mix_: Mix) -> None:
        tasks = []
        for number, plan in enumerate(plans):
            route = self._route(plan, banks.device)
            # All ranks cut alike: by the rows that one of them mixes at most.
            widest = max(len(need) for need in plan.needs)
            cuts = blocks(banks.shape[2], max(1, widest) * banks.element_size(), PIECE_BYTES)
            tasks += [(number, columns, banks[plan.cluster], route) for columns in cuts]
        under_way: _UnderWay | None = None
        for task in [*tasks, None]:
            ahead = None if task is None else self._send(*task)
            if under_way is not None:
                _call(under_way.work.wait)
                mix_(under_way.number, under_way.columns, under_way.incoming)
            under_way = ahead

    def collect(self, banks: Tensor) -> Iterator[Tensor]:
        for j in range(len(banks)):
            for rank, share in enumerate(self._shares):
                if rank == 0:
                    if self.rank == 0:
                        yield from pieces(banks[j : j + 1])
                elif self.rank == rank:
                    for some in pieces(banks[j : j + 1]):
                        _call(dist.send, some.contiguous(), 0)
                elif self.rank == 0:
                    for rows in self._runs(len(share), banks):
                        yield self._receive(rows, banks, rank)

    def spread_(self, bank: Tensor | None, banks: Tensor) -> None:
        for j in range(len(banks)):
            for rank, share in enumerate(self._shares):
                for rows in self._runs(len(share), banks):
                    if self.rank == rank == 0:
                        assert bank is not None
                        banks[j, rows.start : rows.stop].copy_(bank[j, rows.start : rows.stop])
                    elif self.rank == 0:
                        assert bank is not None
                        first = share.start + rows.start
                        _call(dist.send, bank[j, first : first + len(rows)].contiguous(), rank)
                    elif self.rank == rank:
                        banks[j, rows.start : rows.stop].copy_(self._receive(rows, banks, 0))

    def _route(self, plan: ExchangePlan, device: torch.device) -> _Route:
        """Find the rows that this rank keeps for itself, those that it sends, and how many go where."""
        wanted = [need[is_in(self.members, need)] - self.members.start for need in plan.needs]
        given = [int(is_in(share, plan.needs[self.rank]).sum()) for share in self._shares]
        kept, nothing = wanted[self.rank], wanted[self.rank][:0]
        wanted[self.rank], given[self.rank] = nothing, 0
        counts = [len(some) for some in wanted]
        return _Route(kept.to(device), torch.cat(wanted).to(device), counts, given)

    def _send(self, number: int, columns: slice, models: Tensor, route: _Route) -> _UnderWay:
        """Start to exchange one block of the models of a cluster (L, P)."""
        block, own = models[:, columns], len(route.kept)
        outgoing = block.index_select(0, route.sent)
        incoming = block.new_empty(own + sum(route.given), block.shape[1])
        torch.index_select(block, 0, route.kept, out=incoming[:own])
        counts = route.given, route.counts
        work = _call(dist.all_to_all_single, incoming[own:], outgoing, *counts, async_op=True)
        return _UnderWay(number, columns, incoming, work, outgoing)

    def _runs(self, rows: int, banks: Tensor) -> Iterator[range]:
        """Cut rows as `pieces` does."""
        step = max(1, PIECE_BYTES // max(1, banks.shape[2] * banks.element_size()))
        return (range(begin, min(rows, begin + step)) for begin in range(0, rows, step))

    def _receive(self, rows: range, banks: Tensor, rank: int) -> Tensor:
        received = torch.empty(len(rows), banks.shape[2], dtype=banks.dtype)
        _call(dist.recv, received, rank)
        return received

    def _share_bytes(self, blob: bytes, owner: int = 0) -> bytes:
        size = torch.tensor([len(blob)])
        _call(dist.broadcast, size, owner)
        packed = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if self.rank == owner else None
        shared = torch.empty(int(size), dtype=torch.uint8) if packed is None else packed
        _call(dist.broadcast, shared, owner)
        return shared.numpy().tobytes()


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call torch, and turn what it says when another rank is gone into one sentence."""
    try:
        with _watchdog.calling():
            return function(*args, **options)
    except RuntimeError as error:
        with _watchdog.calling():
            error_there = _last_error()
        lost = RankLost(_sentence(error_there or "it was killed, ran out of memory, or its machine cannot be reached"))
        lost.explained = bool(error_there)
        raise lost from error


def _sentence(why: str) -> str:
    return (
        f"rank {my_rank()} lost another rank ({why}); what is stored is kept: the same command continues from the "
        "last checkpoint, also with another number of ranks"
    )


_watchdog = Watchdog(
    lambda: _sentence("it was killed, ran out of memory, or does not answer while torchrun ends the run"),
    RankLost.status,
)


def _last_error() -> str:
    """Read the error that a rank left before it ended."""
    with suppress(Exception):
        store = _store()
        for rank in range(dist.get_world_size()):
            if store.check([_key(rank)]):
                return f"rank {rank} ended with: {store.get(_key(rank)).decode()}"
    return ""


def _key(rank: int) -> str:
    return f"dfca/last-words/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
