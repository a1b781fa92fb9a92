"""DFCA: Decentralized Federated Clustering Algorithm (Kirch, Becker, Rodrigues, Harmeling; IEEE IoT Journal).

Each round, client i with neighbours N_i:
  1. c(i) <- argmin_j F_client(theta_ij, D_i)                                           assign
  2. tau times: theta_i,c(i) <- theta_i,c(i) - gamma grad F_client(theta_i,c(i), D_i)   train only that one
  3. send theta_i,c(i) to all neighbours; for every j, with N_ij = {m in N_i : c(m) = j},
     theta_ij <- 1/(|N_ij|+1) (theta_ij + sum_{m in N_ij} theta_mj)                     as a running average

Differs from the paper in: nothing in the rule of `dfca-gi` and `dfca-li`. Clients that sit a round out (not in M_t)
neither send nor receive. `dfca-fi` and `dfca-auto` are ours and go beyond the paper: docs/beyond.md.
"""

from __future__ import annotations

from dfca.core.algorithm import Algorithm, Choice, View
from dfca.core.method import ElectionOptions, MergeOptions


def dfca_gi(momentum: float | None = None) -> Algorithm:
    """DFCA with a global start: all clients begin with the same k models (the paper's DFCA-GI)."""
    return Algorithm("dfca-gi", start="shared", exchange="gossip", choose=lowest_loss, momentum=momentum)


def dfca_li(momentum: float | None = None) -> Algorithm:
    """DFCA with local starts: every client draws its own k models (the paper's DFCA-LI)."""
    return Algorithm("dfca-li", start="own", exchange="gossip", choose=lowest_loss, momentum=momentum)


def dfca_fi(
    warmup_steps: int = 50,
    level: float = 0.001,
    support: int = 2,
    patience: int = 5,
    most: int = 16,
    momentum: float | None = None,
) -> Algorithm:
    """DFCA from elected starts: farthest-first among warmed-up models, so that every cluster gets one."""
    options = ElectionOptions(warmup_steps, level, support, patience, most)
    return Algorithm(
        "dfca-fi", start="elected", exchange="gossip", choose=lowest_loss, election=options, momentum=momentum
    )


def dfca_auto(
    warmup_steps: int = 50,
    level: float = 0.001,
    support: int = 2,
    patience: int = 5,
    most: int = 16,
    momentum: float = 0.9,
    merge: bool = True,
    warmup_momentum: float = 0.0,
) -> Algorithm:
    """Ours, recommended: elected starts, k found by the clients, relays, revival, momentum, a personal last step.

    k is found where it is not given, and models are relayed on sparse graphs (docs/beyond.md).
    merge: where k is not given, open more clusters than needed and merge those that are not worth their data; False:
    the election's verdict decides alone. warmup_momentum: 20 steps with 0.9 go about as far as 50 without.
    """
    options = ElectionOptions(warmup_steps, level, support, patience, most, warmup_momentum=warmup_momentum)
    return Algorithm(
        "dfca-auto",
        start="elected",
        exchange="gossip",
        choose=lowest_loss,
        election=options,
        share="relay",
        revives=True,
        momentum=momentum,
        personal_steps="auto",
        merging=MergeOptions() if merge else None,
    )


def lowest_loss(view: View) -> Choice:
    """Choose c(i) = argmin_j F_client(theta_ij, D_i)."""
    from dfca.core.learning.local import lowest  # late: it loads torch, which names and options do without

    return Choice(lowest(view.losses))
