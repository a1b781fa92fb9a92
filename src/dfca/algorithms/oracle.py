"""Oracle: IFCA whose clients know their true cluster. Not a method; the ceiling for all of them.

theta_j <- mean over the clients i of true cluster j of tau local steps from theta_j on D_i.
"""

from __future__ import annotations

from dfca.base.errors import DataError
from dfca.core.algorithm import Algorithm, Choice, View


def oracle(momentum: float | None = None) -> Algorithm:
    """The ceiling: a server, and every client knows its true cluster."""
    return Algorithm(
        "oracle",
        start="shared",
        exchange="server",
        choose=true_cluster,
        needs="nothing",
        informed=True,
        momentum=momentum,
    )


def true_cluster(view: View) -> Choice:
    """Choose the true cluster, which the client knows."""
    if view.true_cluster is None:
        raise DataError("the oracle needs true clusters, and this data set has none; leave it out of `algorithms`")
    return Choice(view.true_cluster)
