"""The known data sets, read from `sources.toml`: what they are, their official files with checksums, and which of them
are here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dfca.base.errors import unknown
from dfca.data.files.cache import cached_path

SampleKind = Literal["image", "window", "series"]


@dataclass(frozen=True)
class RemoteFile:
    """One official file."""

    name: str
    urls: tuple[str, ...]  # mirrors of the same bytes
    sha256: str | None = None  # None: none is published


@dataclass(frozen=True)
class DataSource:
    """A data set, its official files, and how to get it where there are none."""

    name: str
    description: str
    kind: SampleKind
    classes: int
    shape: tuple[int, ...]  # channels first
    samples: str
    homepage: str
    licence: str
    citation: str
    files: tuple[RemoteFile, ...] = ()
    by_hand: str = ""
    # Images are dark on white. They are inverted for models, so that the background is 0 as in the others: where nearly
    # every input is 1, a few steps at the paper's learning rates leave all units of an MLP dead.
    on_white: bool = False
    task: str = "classification"
    generated: bool = False  # it has no files


def _source(name: str, values: dict[str, Any]) -> DataSource:
    remote = (RemoteFile(**{**file, "urls": tuple(file["urls"])}) for file in values.pop("files", ()))
    return DataSource(**{**values, "name": name, "shape": tuple(values["shape"]), "files": tuple(remote)})


_TABLE = tomllib.loads((files("dfca.data") / "sources.toml").read_text(encoding="utf-8"))
_ALL = {name: _source(name, values) for name, values in _TABLE.items()}
SOURCES = {name: source for name, source in _ALL.items() if not source.generated}
GENERATED = {name: source for name, source in _ALL.items() if source.generated}


def source_of(name: str) -> DataSource:
    """Look a data set up by name. Raises ConfigError with the near matches for a name that does not exist."""
    source = SOURCES.get(name) or GENERATED.get(name)
    if source is None:
        raise unknown("dataset", name, (*SOURCES, *GENERATED))
    return source


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
