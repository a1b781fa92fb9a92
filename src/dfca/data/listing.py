"""The catalogue of data sets: what there is, and whether it is here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dfca.data.files.cache import cached_path
from dfca.data.registry import GENERATED, SOURCES


class CatalogueEntry(NamedTuple):
    """One row of the catalogue. `path` is the cache file, None where there is none; `ready`: it can be loaded."""

    name: str
    description: str
    classes: int
    samples: str
    source: str
    path: Path | None
    ready: bool
    licence: str
    citation: str


def catalogue() -> list[CatalogueEntry]:
    """List every data set: what it is, where it comes from, and whether it is here."""
    rows = []
    for source in (*SOURCES.values(), *GENERATED.values()):
        path = cached_path(source.name) if source.name in SOURCES else None
        ready = path is not None or source.name == "digits" or source.name in GENERATED
        rows.append(
            CatalogueEntry(
                source.name,
                source.description,
                source.classes,
                source.samples,
                source.homepage,
                path,
                ready,
                source.licence,
                source.citation,
            )
        )
    return rows
