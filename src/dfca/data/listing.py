"""The catalogue of data sets: what there is, and whether it is here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dfca.data.files.cache import cached_path
from dfca.data.registry import GENERATED, SOURCES, DataSource


class CatalogueEntry(NamedTuple):
    """One row of the catalogue."""

    name: str
    source: DataSource
    path: Path | None  # the cache file
    ready: bool  # it can be loaded


def catalogue() -> list[CatalogueEntry]:
    """List every data set."""
    paths = {name: cached_path(name) for name in SOURCES}
    rows = [
        CatalogueEntry(name, source, paths[name], paths[name] is not None or name == "digits")
        for name, source in SOURCES.items()
    ]
    return rows + [CatalogueEntry(name, source, None, True) for name, source in GENERATED.items()]
