"""Facade: fair decentralised learning with a shared core and k heads (Biswas, Kermarrec, Marouani, Pires, Sharma,
de Vos; SaTML 2025).

Client i holds one core phi_i (the lower layers) and k heads psi_i1..k (the last). Each round, with neighbours N_i:
  1. h(i) <- argmin_l F_client((phi_i, psi_il), D_i)                                    choose a head
  2. tau local steps of phi_i and psi_i,h(i) together                                   train both
  3. send (phi_i, psi_i,h(i), h(i)) to all neighbours; phi_i <- mean of the own and all received cores;
     psi_il <- mean of the own and the received heads with the index l

With an empty core it is DFCA-LI.

Differs from the paper in: the graph is the experiment's and stays (there a fresh random regular graph every round); no
last all-reduce; full-batch steps by default, as for all algorithms here. Every client draws its own start.
"""

from __future__ import annotations

from dfca.algorithms.dfca import lowest_loss
from dfca.core.algorithm import Algorithm


def facade(head: int | str = 1, momentum: float | None = None) -> Algorithm:
    """Facade: one core for everybody and a head per cluster.

    head: the last layers, by their number or by their names.
    """
    return Algorithm(
        "facade",
        start="own",
        exchange="gossip",
        choose=lowest_loss,
        share="trained",
        momentum=momentum,
        head=head,
        body="common",
    )
