"""How models of one cluster are merged: one by one (`fold`), or all of a synchronous round at once (`mix`).

Client i merges cluster j with the neighbours N_ij that trained j this round:

  uniform      theta_i <- 1/(|N_ij|+1) (theta_i + sum_m theta_m)      the paper's batch rule; row-stochastic
  metropolis   theta_i <- theta_i + sum_m (theta_m - theta_i) / (1 + max(d_i, d_m)),   d the degrees in the graph
  push         theta_i <- (a_i theta_i + sum_m a_m theta_m) / (a_i + sum_m a_m),   a_m = mu_m / (1 + receivers of m);
               mu_i <- a_i + sum_m a_m   (push-sum; for links that carry models one way, and one model per client)

The uniform rule does not preserve the network's average. Metropolis weights are symmetric, so they preserve the average
of the clients that trained j; a client that only listens moves towards its neighbours and no rule that sends nothing
back can be doubly stochastic for it. Where all clients train one model the matrix is doubly stochastic. Push-sum
preserves sum_i mu_i theta_i, whatever the directions of the links, as long as nothing that is sent is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dfca.core.method import WEIGHT_RULES as WEIGHT_RULES
from dfca.core.method import WeightRule as WeightRule

CORE_BYTES = 2**20  # models of a block that one core mixes: read and written twice, the second time in the cache
SPARSE_BYTES = 2 * 2**20  # what one block of a sparse sum touches: near the cache
BLOCK_COLUMNS = 512  # columns of the narrowest block: a shorter piece of a row is not worth a read of its own
SPARSE_FROM = 16  # entries of the dense matrix per link from which on links are summed one by one


def fold(average: Tensor, count: int, incoming: Tensor) -> tuple[Tensor, int]:
    """Fold one received model into a running average: a' = (r a + x) / (r + 1), r = count + 1.

    count is the number of models folded since the client's last local update: own copy and neighbours weigh the same.
    A count of -1 says that the own copy does not count (r = 0): the first model replaces it.
    """
    r = count + 1
    if r == 0:
        return incoming.clone(), r
    return average + (incoming - average) / (r + 1), r


def fold_(average: Tensor, count: int, incoming: Tensor, weight: float = 1.0) -> int:
    """Fold in place, in one pass: a += w (x - a) / (r + 1), r = count + 1; returns r. w = 1 is `fold`.

    weight in [0, 1] discounts a model that is stale. Where r = 0 the first model replaces the own one, whatever its w.
    """
    r = count + 1
    if r == 0:
        average.copy_(incoming)
    else:
        average.lerp_(incoming, weight / (r + 1))
    return r


def fold_weighted_(average: Tensor, own: Tensor, incoming: Tensor, weight: float) -> None:
    """Fold in place with a fixed weight: a += w (x - own), own the copy before the first fold."""
    average.add_(incoming, alpha=weight).sub_(own, alpha=weight)


def metropolis_weight(degree: int, other_degree: int) -> float:
    """Weigh an edge by the larger degree of its ends: w = 1 / (1 + max(d_i, d_m))."""
    return 1.0 / (1 + max(degree, other_degree))


def fold_mass_(average: Tensor, mass: float, incoming: Tensor, share: float) -> None:
    """Fold in place by push-sum: a <- (mu a + s x) / (mu + s), mu the mass behind a, s the one that came with x."""
    average.lerp_(incoming, share / (mass + share))


class WeightedLinks(NamedTuple):
    """The models of one cluster that travel in a round, one per link.

    theta_i' = (1 - sum of the weights of i's links) theta_i + sum over i's links of weight theta_sender
    """

    receiver: Tensor  # (L,)
    sender: Tensor  # (L,)
    weight: Tensor  # (L,)


def make_links(edges: Tensor, degrees: Tensor, senders: Tensor, receivers: Tensor, rule: WeightRule) -> WeightedLinks:
    """Write all folds of one cluster in a round as weighted links.

    edges (2, E): the graph as (receiver, sender), each edge in both directions; degrees (N,); senders and receivers
    (N,) bool: who trained the cluster, and who listens. Weights are in double precision.
    """
    receiver, sender = edges[:, receivers[edges[0]] & senders[edges[1]]].long()
    if rule == "uniform":
        received = torch.bincount(receiver, minlength=len(degrees))
        return WeightedLinks(receiver, sender, 1 / (received[receiver].double() + 1))
    return WeightedLinks(receiver, sender, 1 / (1 + torch.maximum(degrees[receiver], degrees[sender]).double()))


def push_links(edges: Tensor, mass: Tensor, senders: Tensor, receivers: Tensor) -> tuple[WeightedLinks, Tensor]:
    """Write the folds of a round of push-sum as weighted links; returns them and the masses (N,) after it.

    mass (N,): mu of every client; the others as for `make_links`.
    """
    receiver, sender = edges[:, receivers[edges[0]] & senders[edges[1]]].long()
    share = mass / (1 + torch.bincount(sender, minlength=len(mass)))
    after = share.index_add(0, receiver, share[sender])
    return WeightedLinks(receiver, sender, share[sender] / after[receiver]), after


def mix(models: Tensor, links: WeightedLinks) -> Tensor:
    """Apply the links of a round at once: models (N, P) -> (N, P)."""
    receiver, sender, weight = links
    weight = weight.to(models.dtype)
    own = torch.ones(len(models), dtype=models.dtype).index_add_(0, receiver, -weight)
    return (own[:, None] * models).index_add_(0, receiver, weight[:, None] * models[sender])


class Mixer:
    """`mix` in place, for some rows of a bank and a block of columns at a time: no second copy of the bank.

    sources (S,) are the distinct senders of the links, in the order in which they come in.
    """

    def __init__(
        self,
        links: WeightedLinks,
        sources: Tensor,
        first: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        held: bool = True,
    ) -> None:
        """Prepare for a block whose row 0 is the model of client `first`; all receivers have a row in it.

        size: the rows of the block. Where more than half of them receive, all are mixed, the others with weight 1 on
        their own model: cheaper than picking them out. held: every sender sent the model that it holds.
        """
        rows, position = torch.unique(links.receiver, return_inverse=True)
        if 2 * len(rows) > size:
            rows, position = torch.arange(first, first + size), links.receiver - first
        names, places = sources.sort()
        column = places[torch.searchsorted(names, links.sender)]
        self.rows = (rows - first).to(device)
        own = torch.ones(len(rows), dtype=torch.float64).index_add_(0, position, -links.weight)
        self._own = own.to(dtype).to(device)[:, None]
        weight = links.weight.to(dtype)
        self._matrix: Tensor | None = None
        if len(rows) * len(sources) <= SPARSE_FROM * len(column):
            matrix = torch.zeros(len(rows), len(sources), dtype=dtype)
            matrix.index_put_((position, column), weight, accumulate=True)
            self._all_send = held and torch.equal(rows, sources)
            if self._all_send:  # what a client keeps of its own model is one more weight
                matrix.diagonal().add_(own.to(dtype))
            self._matrix = matrix.to(device)
            return
        order = (position * len(sources) + column).argsort()
        received = torch.bincount(position, minlength=len(rows))
        bags = (column[order].int(), (received.cumsum(0) - received).int(), weight[order])
        self._columns, self._starts, self._weights = (part.to(device) for part in bags)

    def apply_(self, block: Tensor, incoming: Tensor) -> None:
        """Mix what was sent, incoming (S, w), into a block (N, w)."""
        if len(self.rows) != len(block):
            mine = block[self.rows]
            self._mix_(mine, incoming)
            block[self.rows] = mine
        else:
            self._mix_(block, incoming)

    def _mix_(self, mine: Tensor, incoming: Tensor) -> None:
        rows, limit = (len(mine), CORE_BYTES) if self._matrix is not None else (len(mine) + len(incoming), SPARSE_BYTES)
        for columns in blocks(mine.shape[1], rows * mine.element_size(), limit):
            block, sent = mine[:, columns], incoming[:, columns]
            if self._matrix is None:
                sums = embedding_bag(self._columns, sent, self._starts, mode="sum", per_sample_weights=self._weights)
                torch.addcmul(sums, block, self._own, out=block)
            elif self._all_send:
                block.addmm_(self._matrix, sent, beta=0)
            else:
                block.mul_(self._own).addmm_(self._matrix, sent)


class Folder:
    """`fold` what each client receives in its own order of arrival, in place: the paper's sequential aggregation.

    arrivals[i] are the rows of `incoming` that reach row i of a block, in order.
    """

    def __init__(self, arrivals: Sequence[Sequence[int]]) -> None:
        self._arrivals = arrivals

    def apply_(self, block: Tensor, incoming: Tensor) -> None:
        """Fold what was sent, incoming (S, w), into a block (N, w)."""
        for receiver, order in enumerate(self._arrivals):
            average, count = block[receiver], 0
            for sender in order:
                average, count = fold(average, count, incoming[sender])
            block[receiver] = average


def blocks(size: int, column_bytes: int, block_bytes: int) -> Iterator[slice]:
    """Cut the columns of a bank into blocks of at most `block_bytes`, but no narrower than BLOCK_COLUMNS."""
    width = max(BLOCK_COLUMNS, block_bytes // max(1, column_bytes))
    return (slice(begin, min(size, begin + width)) for begin in range(0, size, width))
