"""All algorithms, one paper per file; `dfca-gi` and `dfca-li` are the paper's DFCA, `dfca-auto` is ours, recommended.

A new one is one file and one line here; the contract tests pick it up.

Algorithms elsewhere need no line: "my.module:mine" names one, and an installed package may have entry points of the
group "dfca.algorithms".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dfca.algorithms.dac import dac
from dfca.algorithms.deprl import deprl
from dfca.algorithms.dfca import dfca_auto, dfca_fi, dfca_gi, dfca_li
from dfca.algorithms.dfedavgm import dfedavgm
from dfca.algorithms.dfedpgp import dfedpgp
from dfca.algorithms.dpfl import dpfl
from dfca.algorithms.facade import facade
from dfca.algorithms.fedavg import fedavg
from dfca.algorithms.fedem import fedem
from dfca.algorithms.fedspd import fedspd
from dfca.algorithms.ifca import ifca
from dfca.algorithms.local import local
from dfca.algorithms.oracle import oracle
from dfca.algorithms.pens import pens
from dfca.algorithms.psfl import psfl
from dfca.base.errors import ConfigError, DfcaError, unknown
from dfca.base.imports import import_object, is_import
from dfca.base.renamed import RENAMED, refuse_earlier
from dfca.core.algorithm import Algorithm


class _Table(dict[str, Callable[..., Algorithm]]):
    def __missing__(self, name: str) -> Callable[..., Algorithm]:
        refuse_earlier(name)
        raise KeyError(name)


ALGORITHMS: dict[str, Callable[..., Algorithm]] = _Table()
ALGORITHMS |= {
    "dfca-auto": dfca_auto,
    "dfca-fi": dfca_fi,
    "dfca-gi": dfca_gi,
    "dfca-li": dfca_li,
    "ifca": ifca,
    "fedspd": fedspd,
    "facade": facade,
    "fedem": fedem,
    "deprl": deprl,
    "dfedpgp": dfedpgp,
    "pens": pens,
    "dac": dac,
    "dpfl": dpfl,
    "psfl": psfl,
    "dfedavgm": dfedavgm,
    "fedavg": fedavg,
    "local": local,
    "oracle": oracle,
}

OPTIONS: dict[str, str] = {
    "warmup_steps": "local steps of every client before the election of the starts",
    "warmup_momentum": "of these steps, begun anew after every local.steps of them",
    "level": "error rate of one verdict of the election, below 0.5",
    "support": "clients that a new centre must help, its own included",
    "patience": "rejected candidates in a row that end the election",
    "most": "largest number of clusters that the clients open where k is not given",
    "merge": "where k is not given, open more clusters than needed and merge those that are not worth their data; "
    "false: the election's verdict decides alone",
    "momentum": "of the local steps; not set: local.momentum",
    "finetune_epochs": "passes over its data by which a client fine-tunes its mixture before it is scored",
    "finetune_batch": "samples of one step of that",
    "head": "the last layers that are the head: how many, or the beginning of their names",
    "head_steps": "steps of the head per round, the body fixed; not set: local.steps",
    "body_steps": "steps of the body per round, the head fixed; not set: local.steps",
    "selection_rounds": "rounds at the start in which clients try out peers",
    "sampled": "peers whose models a client receives per round",
    "best": "of these, how many it averages with while it tries out peers",
    "peers": "whom it may ask: any client, or its neighbours in the graph",
    "budget": "most peers that it averages with",
    "every": "rounds from one average to the next; between them clients train alone",
    "threshold": "cross-loss, summed along the links to its leader, up to which a client joins a region",
    "tau": "how strongly similar peers are preferred in late rounds; 1 or more",
}
"""What the options of the algorithms mean; the parameters of the functions above."""


def get(name: str, **options: object) -> Algorithm:
    """Make an algorithm by name, or by "module:function"; options are the keywords of its function.

    Raises ConfigError on an unknown name or option, with the known ones, and for what is not an algorithm.
    """
    make = maker(name)
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f'algorithm "{name}" must be a function or an Algorithm: {error}') from error
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    try:
        algorithm = make(**options)
    except DfcaError:
        raise
    except Exception as error:  # a user's own function
        raise ConfigError(f'algorithm "{name}" fails with {type(error).__name__}: {error}') from error
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f'algorithm "{name}" must return an Algorithm, got {type(algorithm).__name__}')
    return algorithm


def maker(name: str) -> Callable[..., Algorithm]:
    """Find the function that makes an algorithm: in the table, among installed packages, or as "module:function".

    "module:name" may also be the record itself. Raises ConfigError where there is none.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    refuse_earlier(name)
    if is_import(name):
        return _function(import_object(name, "algorithm"))
    plugins = installed()
    if name not in plugins:
        error = unknown("algorithm", name, [*ALGORITHMS, *plugins])
        raise ConfigError(f'{error}; your own is "module:function"')
    try:
        return _function(plugins[name].load())
    except Exception as error:  # of another package
        raise ConfigError(
            f'algorithm "{name}" of the entry point {plugins[name].value} cannot be loaded: '
            f"{type(error).__name__}: {error}"
        ) from error


def about(make: Callable[..., Algorithm]) -> str:
    """Describe an algorithm in one line: the first of its function's docstring."""
    return (inspect.getdoc(make) or "").partition("\n")[0]


def base_of(label: str) -> str:
    """Return the algorithm of a label, which begins with its name.

    >>> base_of("fedavg, momentum 0.9"), base_of("dfca-gi"), base_of("my.module:mine (slow)")
    ('fedavg', 'dfca-gi', 'my.module:mine')
    """
    return re.split(r"[ ,+(=]", label, maxsplit=1)[0]


def installed() -> dict[str, EntryPoint]:
    """Find the algorithms of installed packages: their entry points of the group "dfca.algorithms", by name."""
    taken = {*ALGORITHMS, *RENAMED}
    return {entry.name: entry for entry in entry_points(group="dfca.algorithms") if entry.name not in taken}


def _function(value: Any) -> Callable[..., Algorithm]:
    """Return a function that makes the algorithm; a record is one already."""
    if isinstance(value, Algorithm):
        return lambda: value
    make: Callable[..., Algorithm] = value
    return make
