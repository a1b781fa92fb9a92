"""DePRL: personalised decentralised learning with shared representations (Xiong, Yan, Wang, Li; AAAI 2024).

Client i holds a body u_i (the lower layers) and a head v_i (the last), which it keeps for itself. Each round:
  1. K_v steps of v_i with u_i fixed:   v_i <- v_i - gamma grad_v F_client((u_i, v_i), D_i)
  2. K_u steps of u_i with v_i fixed:   u_i <- u_i - gamma grad_u F_client((u_i, v_i), D_i)
  3. send u_i to the neighbours;        u_i <- sum_m w_im u_m   (Metropolis weights, doubly stochastic)

Differs from the paper in: K_v and K_u are both the experiment's number of local steps unless they are given (there
K_u = 1; `body_steps = 1` is that); full-batch steps by default, as for all algorithms here; one learning rate for both.
A client that joins late or anew begins with the body of a neighbour and a head of zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dfca.algorithms.fedavg import ONE_EACH
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Algorithm
from dfca.core.learning.parts import Phase


def deprl(
    head: int | str = 1, head_steps: int | None = None, body_steps: int | None = None, momentum: float | None = None
) -> Algorithm:
    """DePRL: a body that all share and a head that stays with its client.

    head: the last layers, by their number or by their names.
    """
    return divided("deprl", "metropolis", head, head_steps, body_steps, momentum)


def divided(
    name: str,
    weights: Literal["metropolis", "push"],
    head: int | str,
    head_steps: int | None,
    body_steps: int | None,
    momentum: float | None,
) -> Algorithm:
    """Make an algorithm with a body that is averaged and a private head, trained one after the other."""
    for option, value in (("head_steps", head_steps), ("body_steps", body_steps)):
        if value is not None and value < 0:
            raise ConfigError(f"algorithm.{name}.{option} must be >= 0, got {value}")
    return replace(
        ONE_EACH,
        name=name,
        momentum=momentum,
        weights=weights,
        head=head,
        private_head=True,
        schedule=(Phase("head", head_steps), Phase("body", body_steps)),
    )
