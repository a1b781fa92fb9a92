"""IFCA: Iterative Federated Clustering Algorithm, model averaging (Ghosh, Chung, Yin, Ramchandran; NeurIPS 2020).

The server sends k models to the clients of M_t; each picks the one with the lowest loss on its data, takes tau local
steps and sends it back; the server sets theta_j to the mean of the models of the clients that picked j. A cluster that
no client picked keeps its model.

Differs from the paper in: nothing in the rule; as there, all clients have the same weight.
"""

from __future__ import annotations

from dfca.algorithms.dfca import lowest_loss
from dfca.core.algorithm import Algorithm


def ifca(momentum: float | None = None) -> Algorithm:
    """IFCA: k models on a server, every client trains the one that fits it best (the centralised baseline)."""
    return Algorithm("ifca", start="shared", exchange="server", choose=lowest_loss, momentum=momentum)
