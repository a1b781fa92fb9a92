"""DFedAvgM: Decentralized Federated Averaging with momentum (Sun, Li, Wang; TPAMI 2023).

One model per client. Each round tau heavy-ball steps from y^0 = theta_i,
  y^{q+1} = y^q - gamma grad F(y^q) + momentum (y^q - y^{q-1}),   y^{-1} = y^0,
then one gossip step with a doubly stochastic matrix: theta_i <- sum_m w_im y_m^tau (Metropolis weights).

Differs from the paper in: full-batch steps by default, as for all algorithms here; no quantisation.
"""

from __future__ import annotations

from dfca.algorithms.fedavg import only_model
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm


def dfedavgm(momentum: float = 0.9) -> Algorithm:
    """DFedAvgM: one model per client, local steps with momentum, one gossip step."""
    if not 0 <= momentum < 1:
        raise ConfigError(f"algorithm.dfedavgm.momentum must be in [0, 1), got {momentum}")
    return Algorithm(
        "dfedavgm",
        start="shared",
        exchange="gossip",
        choose=only_model,
        models="one",
        needs="nothing",
        weights="metropolis",
        momentum=momentum,
    )
