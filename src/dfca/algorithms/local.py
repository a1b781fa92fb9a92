"""Local: every client trains one model on its own data and sends nothing. The floor for methods that communicate."""

from __future__ import annotations

from dfca.algorithms.fedavg import only_model
from dfca.core.algorithm import Algorithm


def local(momentum: float | None = None) -> Algorithm:
    """No communication: every client trains one model alone."""
    return Algorithm(
        "local",
        start="shared",
        exchange="none",
        choose=only_model,
        models="one",
        needs="nothing",
        momentum=momentum,
    )
