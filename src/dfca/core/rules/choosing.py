"""Methods whose clients choose whom they average with: by how well the models of others do on their own data.

In every round, after its local steps, client i
  1. draws peers among those that it may ask, and receives their models theta_j                    draw
  2. computes L_i(theta_j), the mean loss of each on its own training samples, or on those that it holds out
  3. theta_i <- w_0 theta_i + sum_j w_j theta_j, and remembers what it has learned of the others   merge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from dfca.base.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Among = Literal["any", "neighbours"]
AMONG: tuple[Among, ...] = ("any", "neighbours")


class PeerDraw(NamedTuple):
    """What a client sees when it draws peers."""

    client: int
    round: int
    candidates: Sequence[int]  # whom it may ask
    memory: Tensor  # (w,): what it remembers
    random: Callable[[], torch.Generator]  # opens its random stream of this round
    neighbours: Sequence[int] = ()  # the candidates that are neighbours in the graph


class Received(NamedTuple):
    """What a client has received from n peers."""

    client: int
    round: int
    peers: Sequence[int]
    losses: Tensor  # (n,): of their models on its own samples
    sizes: Tensor  # (n + 1,): numbers of samples, its own first
    memory: Tensor  # (w,): what it remembers
    memories: Tensor  # (n, w): what the peers remember
    neighbours: Sequence[int]  # its neighbours in the graph
    random: Callable[[], torch.Generator]  # opens its random stream for this
    score: Callable[[Tensor], Tensor]  # weights (s, n + 1) -> losses (s,) of averages of its own model and the received


class PeerAverage(NamedTuple):
    """How a client averages, and what it remembers of it."""

    weights: Tensor  # (n + 1,): of its own model and of the n received ones
    memory: Tensor  # (w,)


@dataclass(frozen=True)
class PeerChoice:
    """How clients choose whom they average with."""

    draw: Callable[[PeerDraw], Sequence[int]]
    merge: Callable[[Received], PeerAverage]
    among: Among = "any"  # any client, on an overlay beside the graph, or the neighbours in it
    tells: bool = False  # what a peer remembers comes with its model
    unseen: bool = False  # losses are those on samples that a client holds out of training, to the end
    uses_graph: bool = False  # it asks neighbours in the graph, and others by what these tell

    def __post_init__(self) -> None:
        if self.among not in AMONG:
            raise unknown("peers", self.among, AMONG)

    def ask(self, view: PeerDraw) -> list[int]:
        """Call `draw`, and check what it returns.

        Raises ConfigError where a peer is drawn twice, or is no candidate.
        """
        drawn = [int(peer) for peer in self.draw(view)]
        if len(set(drawn)) < len(drawn) or not set(drawn) <= set(view.candidates):
            raise ConfigError(
                f"draw of a PeerChoice must return some of the candidates {list(view.candidates)}, each once, "
                f"got {drawn}"
            )
        return drawn

    def average(self, received: Received) -> PeerAverage:
        """Call `merge`, and check what it returns.

        Raises:
            ConfigError: where the weights are not (n + 1,), at least 0 with the sum 1, or the memory has another shape.
        """
        made, models = self.merge(received), 1 + len(received.peers)
        weights = made.weights
        if weights.shape != (models,) or not (weights >= 0).all() or abs(float(weights.sum()) - 1) > 1e-6:
            shown = [round(weight, 4) for weight in weights.flatten().tolist()]
            raise ConfigError(f"merge of a PeerChoice must return {models} weights >= 0 with the sum 1, got {shown}")
        if made.memory.shape != received.memory.shape:
            shapes = f"{tuple(received.memory.shape)}, got {tuple(made.memory.shape)}"
            raise ConfigError(f"merge of a PeerChoice must return a memory of the shape {shapes}")
        return made


def draw_uniformly(view: PeerDraw, candidates: Sequence[int], many: int) -> list[int]:
    """Draw `many` of some candidates without replacement, or all of them."""
    import torch

    order = torch.randperm(len(candidates), generator=view.random())
    return sorted(candidates[place] for place in order[:many].tolist())


def by_samples(sizes: Tensor) -> Tensor:
    """Weigh models by the numbers of samples behind them: (n + 1,), sum 1."""
    known = sizes.double()
    return known / known.sum()
