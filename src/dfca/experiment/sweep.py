"""Sweeps: one experiment at many points, each the base config with some keys changed.

    [grid]                        # every combination of these values ...
    clients = [12, 24]
    "topology.p" = [0.03, 0.1]

    [[points]]                    # ... for each of these tables laid over the base (without any: for the base itself)
    data.name = "mnist"
    seeds = 5                     # a point may have its own algorithms and seeds

A trial is known by the digest of its point's complete config, so a sweep may grow, shrink or be written in another way:
what is finished stays finished. An experiment without these tables has one point, the config itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dfca.base.errors import ConfigError
from dfca.base.renamed import earlier
from dfca.base.validation import show
from dfca.experiment.config import NOT_IN_DIGEST, Config
from dfca.experiment.variants import flatten, merge, nest, write


@dataclass(frozen=True)
class Point:
    """The complete config at one point; `at` are the keys that distinguish it from the others, None without a sweep."""

    config: Config
    at: dict[str, Any] | None = None

    @cached_property
    def digest(self) -> str:
        """Hash everything that can change a number at this point."""
        return self.config.digest()

    @property
    def label(self) -> str:
        """Write the keys that distinguish this point from the others: "clients=12, data.name=digits"."""
        return "" if self.at is None else label_of(self.at)

    def facts(self) -> dict[str, Any]:
        """Return what tables and reports need to know of a point without reading its config."""
        return {
            "point": self.at or {},
            "label": self.label,
            "digest": self.digest,
            "algorithms": list(self.config.algorithms),
            "seeds": list(self.config.seeds),
            "clients": self.config.clients,
            "clusters": self.config.distributions,
            "rounds": self.config.rounds,
            **({"auto": True} if self.config.clusters == "auto" else {}),
            **self.config.virtual_facts(),
        }


@dataclass(frozen=True)
class Trial:
    """One algorithm with one seed at one point."""

    algorithm: str
    seed: int
    point: Point

    @property
    def key(self) -> tuple[str, int, str]:
        """Identify this trial among all of its run folder."""
        return self.algorithm, self.seed, "" if self.point.at is None else self.point.digest

    @property
    def name(self) -> str:
        """Name the trial's files: "ifca-0"; in a sweep with the first digits of its digest."""
        return trial_name(*self.key)

    def file(self, folder: Path, suffix: str = "") -> Path:
        """Return where a file of this trial is, or will be, in a folder of the run."""
        return trial_file(folder, suffix, *self.key)

    @property
    def head(self) -> dict[str, Any]:
        """Return the keys that begin every line and row of this trial."""
        where = {} if self.point.at is None else {"point": self.point.at, "digest": self.point.digest}
        return {"algorithm": self.algorithm, "seed": self.seed} | where

    def __str__(self) -> str:
        return f"{self.algorithm}, seed {self.seed}" + (f", {self.point.label}" if self.point.label else "")


@dataclass(frozen=True)
class TrialGroup:
    """Trials of one point and seed, which share its data and graph: what one process does in one go."""

    point: Point
    seed: int
    algorithms: tuple[str, ...]

    @property
    def trials(self) -> list[Trial]:
        return [self.trial(name) for name in self.algorithms]

    def trial(self, algorithm: str) -> Trial:
        return Trial(algorithm, self.seed, self.point)


@dataclass(frozen=True)
class Sweep:
    """The tables `[grid]` and `[[points]]` of an experiment file, with flat, dotted keys."""

    grid: dict[str, list[Any]] = field(default_factory=dict)
    points: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.grid or self.points)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sweep:
        """Check the tables of an experiment file; keys may be nested or dotted.

        Raises ConfigError if a table or a list is something else, empty, or varies what is no number of a trial.
        """
        grid, points = values.get("grid", {}), values.get("points", [])
        if not isinstance(grid, Mapping):
            raise ConfigError(f"grid must be a table of lists ([grid] clients = [12, 24]), got {show(grid)}")
        if not isinstance(points, Sequence) or not all(isinstance(table, Mapping) for table in points):
            raise ConfigError(f"points must be a list of tables ([[points]]), got {show(points)}")
        flat = flatten(grid)
        for key, choices in flat.items():
            if not isinstance(choices, list):
                raise ConfigError(f"grid.{key} must be a list of values, got {show(choices)}; try [{show(choices)}]")
            if not choices:
                raise ConfigError(f"grid.{key} must be a list of at least 1, got []; leave the key out instead")
            if key.partition(".")[0] in (*NOT_IN_DIGEST, "device"):
                raise ConfigError(
                    f"grid cannot vary {key}; algorithms and seeds belong at the top of the file or in [[points]], and "
                    "title, description, device and checkpoint are the same for all points"
                )
        tables = tuple(flatten(table) for table in points)
        if any("device" in table for table in tables):
            raise ConfigError("device is the same for all points; set it at the top of the file or by --device")
        return cls(flat, tables)

    def values(self) -> dict[str, Any]:
        """Return the tables as the experiment file has them."""
        tables = {"grid": self.grid, "points": [dict(table) for table in self.points]}
        return {key: value for key, value in tables.items() if value}

    def base(self, values: Mapping[str, Any]) -> Config:
        """Check the base; a key of the grid has its first value there, so a file need not give it twice."""
        first = {key: choices[0] for key, choices in self.grid.items()}
        try:
            return Config.of(merge(values, nest(first)))
        except ConfigError as error:
            raise ConfigError(f"point {label_of(first)}: {error}" if first else str(error)) from None

    def expand(self, base: Config) -> tuple[Point, ...]:
        """Make the points over a base and check each as a whole config. Raises ConfigError naming the point."""
        if not self:
            return (Point(base),)
        tables = [
            table | dict(zip(self.grid, choices, strict=True))
            for table in self.points or ({},)
            for choices in itertools.product(*self.grid.values())
        ]
        points: dict[str, Point] = {}
        for table, at in zip(tables, _distinguish(tables), strict=True):
            name = label_of(at)
            try:
                point = Point(Config.of(merge(base.values(), nest(table))), at)
            except ConfigError as error:
                raise ConfigError(f"point {name}: {error}") from None
            if point.digest in points:
                raise ConfigError(
                    f'two points of the sweep are the same: "{points[point.digest].label}" and "{name}"; leave one out'
                )
            points[point.digest] = point
        return tuple(points.values())


NO_SWEEP = Sweep()


def trial_name(algorithm: str, seed: int, digest: str = "") -> str:
    """Name the files of a trial; `digest` in a sweep.

    >>> trial_name("ifca", 0), trial_name("my.module:mine", 0, "0123456789abcdef")
    ('ifca-0', 'my.module.mine-0-0123456789ab')
    """
    return f"{algorithm.replace(':', '.')}-{seed}" + (f"-{digest[:12]}" if digest else "")


def trial_file(folder: Path, suffix: str, algorithm: str, seed: int, digest: str = "") -> Path:
    """Return where a file of a trial is; files of a trial begun under the earlier name of its algorithm keep theirs."""
    path = folder / f"{trial_name(algorithm, seed, digest)}{suffix}"
    old = folder / f"{trial_name(earlier(algorithm), seed, digest)}{suffix}"
    begun = old.exists() or old.with_name(f"{old.name}.part").exists()  # a trace that is being written
    return old if begun and not path.exists() else path


def label_of(at: Mapping[str, Any]) -> str:
    """Write a point for people.

    >>> label_of({"clients": 12, "data.name": "digits"}), label_of({})
    ('clients=12, data.name=digits', 'base')
    """
    return ", ".join(f"{key}={write(value)}" for key, value in at.items()) or "base"


def _distinguish(tables: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Keep of each table the keys that change numbers and are not the same in all tables."""
    kept = [{k: v for k, v in table.items() if k.partition(".")[0] not in NOT_IN_DIGEST} for table in tables]
    same = {
        key for key in kept[0] if len(kept) > 1 and all(key in point and point[key] == kept[0][key] for point in kept)
    }
    return [{key: value for key, value in point.items() if key not in same} for point in kept]
