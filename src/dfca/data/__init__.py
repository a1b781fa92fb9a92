"""Data: where it comes from (`sources`), how clients divide it (`partitions`), how clusters differ (`transforms`).

The names load on first use, so that reading `DataOptions` imports neither torch nor scikit-learn nor pooch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfca.data.clients import ClientData, Split
    from dfca.data.listing import catalogue
    from dfca.data.options import DataOptions
    from dfca.data.own import split_from
    from dfca.data.partitions import make_split
    from dfca.data.sources import DataSet, fetch, import_file, load

_HOMES = {
    "ClientData": "clients",
    "Split": "clients",
    "DataOptions": "options",
    "make_split": "partitions",
    "DataSet": "sources",
    "catalogue": "listing",
    "fetch": "sources",
    "import_file": "sources",
    "load": "sources",
    "split_from": "own",
}

__all__ = [
    "ClientData",
    "DataOptions",
    "DataSet",
    "Split",
    "catalogue",
    "fetch",
    "import_file",
    "load",
    "make_split",
    "split_from",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
