"""Clustered federated learning without a server.

>>> import dfca
>>> split = dfca.make_split(dfca.DataOptions(name="digits"), clients=8, clusters=2, seed=0)
>>> result = dfca.simulate(lambda: dfca.mlp((1, 8, 8), 10, 32), split, clusters=2, rounds=2, topology="complete")
>>> result.assignments.shape
torch.Size([8])

Public are the names in `__all__`, `dfca.contracts` and `dfca.testing`, the command line, the entry points
"dfca.algorithms", and the files that dfca reads and writes. Everything else may change in any release.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from dfca.algorithms import ALGORITHMS as ALGORITHMS
    from dfca.api.comparison import Comparison as Comparison
    from dfca.api.result import Result as Result
    from dfca.api.simulate import simulate as simulate
    from dfca.api.stored import StoredRun as StoredRun
    from dfca.api.stored import load_run as load_run
    from dfca.base.errors import DfcaError as DfcaError
    from dfca.base.errors import DfcaWarning as DfcaWarning
    from dfca.core.algorithm import Algorithm as Algorithm
    from dfca.core.algorithm import Choice as Choice
    from dfca.core.algorithm import View as View
    from dfca.core.codec import Codec as Codec
    from dfca.core.learning.local import LocalOptions as LocalOptions
    from dfca.core.learning.local import lowest as lowest
    from dfca.core.learning.task import Task as Task
    from dfca.data.clients import ClientData as ClientData
    from dfca.data.clients import Split as Split
    from dfca.data.lazy import map_npz as map_npz
    from dfca.data.options import DataOptions as DataOptions
    from dfca.data.own import split_from as split_from
    from dfca.data.partitions import make_split as make_split
    from dfca.models import cnn as cnn
    from dfca.models import cnn1d as cnn1d
    from dfca.models import mlp as mlp
    from dfca.sim.metrics_table import Metrics as Metrics
    from dfca.sim.rounds.simulation import Simulation as Simulation
    from dfca.sim.setting import Setting as Setting
    from dfca.tasks import make_task as make_task
    from dfca.topology import TopologyOptions as TopologyOptions
    from dfca.topology import make_graph as make_graph

_HOMES = {
    "dfca.algorithms": ("ALGORITHMS",),
    "dfca.api.comparison": ("Comparison",),
    "dfca.api.result": ("Result",),
    "dfca.api.simulate": ("simulate",),
    "dfca.api.stored": ("StoredRun", "load_run"),
    "dfca.core.algorithm": ("Algorithm", "Choice", "View"),
    "dfca.core.codec": ("Codec",),
    "dfca.core.learning.local": ("LocalOptions", "lowest"),
    "dfca.core.learning.task": ("Task",),
    "dfca.data.clients": ("ClientData", "Split"),
    "dfca.data.options": ("DataOptions",),
    "dfca.data.lazy": ("map_npz",),
    "dfca.data.own": ("split_from",),
    "dfca.data.partitions": ("make_split",),
    "dfca.base.errors": ("DfcaError", "DfcaWarning"),
    "dfca.models": ("cnn", "cnn1d", "mlp"),
    "dfca.sim.metrics_table": ("Metrics",),
    "dfca.sim.rounds.simulation": ("Simulation",),
    "dfca.sim.setting": ("Setting",),
    "dfca.tasks": ("make_task",),
    "dfca.topology": ("TopologyOptions", "make_graph"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `dfca --help` must not wait for torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dfca' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
