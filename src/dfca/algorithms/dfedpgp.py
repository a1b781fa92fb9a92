"""DFedPGP: decentralised federated partial gradient push (Liu, Shi, Li, Wu, Wang, Shen; CVPR 2024).

Client i holds a body (the lower layers) as a sum u_i with a push-sum weight mu_i (1 at first), its model
z_i = u_i / mu_i, and a head v_i (the last layer), which it keeps for itself. Links carry models one way, and may change
from round to round. Each round:
  1. K_v steps of v_i with z_i fixed:   v_i <- v_i - gamma grad_v F_client((z_i, v_i), D_i)
  2. K_u steps of the body:             u_i <- u_i + (z_i' - z_i),  z_i' = z_i after K_u steps with v_i fixed
  3. send (u_i, mu_i) / (1 + d_i) to the d_i receivers of this round, and keep as much:
     u_i <- sum_m u_m / (1 + d_m),   mu_i <- sum_m mu_m / (1 + d_m)   over itself and all that send to it
The matrix is column-stochastic, so sum_i u_i is preserved whatever the directions are, and everybody's data weighs the
same; a plain mean of what arrives weighs clients by their place in the graph.

Differs from the paper in: the K_u steps start from z_i and their sum is added to u_i, where the paper adds each step to
u_i and divides again (the same for K_u = 1); the factor 1 / mu_i of a step is at most 4. What travels is z_i with the
weight mu_i / (1 + d_i), which is the same. K_v and K_u are the experiment's local steps unless they are given;
full-batch steps by default, one learning rate for both. Lost messages lose weight: it is made for reliable links.
"""

from __future__ import annotations

from dfca.algorithms.deprl import divided
from dfca.core.algorithm import Algorithm


def dfedpgp(
    head: int | str = 1, head_steps: int | None = None, body_steps: int | None = None, momentum: float | None = None
) -> Algorithm:
    """DFedPGP: a private head, and a body that is pushed over directed links that may change.

    head: the last layers, by their number or by their names.
    """
    return divided("dfedpgp", "push", head, head_steps, body_steps, momentum)
