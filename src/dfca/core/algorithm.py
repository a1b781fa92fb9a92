"""What an algorithm is: a record of pure functions. Who executes it (a simulator, a node) is not its business.

A new algorithm is one record. This one is DFCA whose clients try a random model in one round of ten:

>>> import torch
>>> from dfca.core.algorithm import Algorithm, Choice, View
>>> from dfca.core.local import lowest
>>> def explore(view: View) -> Choice:
...     if torch.rand((), generator=view.random()) < 0.1:
...         return Choice(int(torch.randint(len(view.losses), (), generator=view.random())))
...     return Choice(lowest(view.losses))
>>> curious = Algorithm("curious", start="shared", exchange="gossip", choose=explore)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dfca.core.election import ElectionOptions
from dfca.core.mixing import WeightRule

Share = Literal["trained", "all", "relay"]
SHARES: tuple[Share, ...] = ("trained", "all", "relay")


class View(NamedTuple):
    """What a client sees when it chooses.

    losses: F_client of each of its models, (m,); sample_losses: the loss of each model on each sample, (m, n), only for
    an algorithm that asks for it; random: opens the client's random stream of this round; true_cluster: only for an
    algorithm that is `informed`.
    """

    losses: Tensor
    random: Callable[[], torch.Generator]
    sample_losses: Tensor | None = None
    true_cluster: int | None = None


class Choice(NamedTuple):
    """The model that a client trains this round, and the samples (n,) bool it trains it on; None: all of them."""

    cluster: int
    points: Tensor | None = None


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    start       "shared": all clients derive the same models from the seed; "own": every client draws its own;
                "elected": the clients elect them among models that they warmed up (`core.election`), and their number
                too where it is not given
    exchange    "gossip": with the neighbours on the graph; "server": all clients, and a client's own copy counts only
                if it trained it; "none"
    choose      which model a client trains, and on which samples
    models      "clusters": a client keeps k models; "one"
    needs       what `choose` looks at: "nothing", the "losses" (m,), the "samples" losses (m, n)
    informed    whether clients know their true cluster
    weights     the weight rule, where the algorithm fixes it; None: the experiment's
    momentum    the momentum of the local steps, where the algorithm fixes it; None: the experiment's
    personal    the model (P,) that a client deploys, from its bank (m, P) and its sample losses (m, n); None: the model
                with the lowest training loss
    share       what a client hands on, where the algorithm fixes it: the model that it "trained", "all" its models, or
                "relay" (`core.relay`); None: the experiment's
    election    how centres are elected
    revives     whether a lost cluster or a new distribution can open a new centre while training goes on
    finetune_steps   local steps on all its samples that the personal model gets before it is deployed
    """

    name: str
    start: Literal["shared", "own", "elected"]
    exchange: Literal["gossip", "server", "none"]
    choose: Callable[[View], Choice]
    models: Literal["clusters", "one"] = "clusters"
    needs: Literal["nothing", "losses", "samples"] = "losses"
    informed: bool = False
    weights: WeightRule | None = None
    momentum: float | None = None
    personal: Callable[[Tensor, Tensor], Tensor] | None = None
    finetune_steps: int = 0
    share: Share | None = None
    election: ElectionOptions = field(default_factory=ElectionOptions)
    revives: bool = False

    def bank_size(self, clusters: int) -> int:
        """Count the models that a client keeps."""
        return clusters if self.models == "clusters" else 1
