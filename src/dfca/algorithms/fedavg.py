"""FedAvg: Federated Averaging (McMahan, Moore, Ramage, Hampson, Aguera y Arcas; AISTATS 2017).

One model on a server: theta <- mean over the clients of M_t of tau local steps from theta on D_i.

Differs from the paper in: clients weigh the same (there n_i / n; equal under the rotated split); full-batch steps by
default, as for all algorithms here.
"""

from __future__ import annotations

from dfca.core.algorithm import Algorithm, Choice, View


def fedavg(momentum: float | None = None) -> Algorithm:
    """FedAvg: one model for everybody, averaged by a server."""
    return Algorithm(
        "fedavg",
        start="shared",
        exchange="server",
        choose=only_model,
        models="one",
        needs="nothing",
        momentum=momentum,
    )


def only_model(view: View) -> Choice:
    """Choose the one model there is."""
    return Choice(0)


ONE_EACH = Algorithm(
    "one each", start="shared", exchange="gossip", choose=only_model, models="one", needs="nothing", share="trained"
)
"""One model per client, all of the same start, that travels between clients: what algorithms without clusters share."""
