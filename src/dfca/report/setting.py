"""What was run, in words: the size of a run, its options, what the command line changed, the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dfca import topology
from dfca.algorithms import base_of
from dfca.data.options import DataOptions
from dfca.experiment.variants import write
from dfca.model_options import ModelOptions
from dfca.report.rows import kind_of
from dfca.report.virtual.summary import virtual_points
from dfca.report.wording import count, world_in_words
from dfca.runs.store.reading import Run
from dfca.sim.metrics_table import JsonObject


def size_of(run: Run) -> list[str]:
    """Describe how large the run is: "4 points (clients)", "12 to 24 clients", ..."""
    points = f"{count(len(run.points), 'point')} ({', '.join(run.varying)})" if run.swept else ""
    true = any(graph.get("clusters") for graph in run.topology.values())
    auto = run.config.get("clusters") == "auto"
    groups = _amount(run, "clusters", "hidden group" if true else "model") if true or not auto else ""
    parts = [
        points,
        _amount(run, "clients", "client"),
        f"{groups} of data" if true else groups,
        "k found by the clients" if auto else "",
        _amount(run, "rounds", "round"),
        count(len(run.algorithms), "algorithm"),
        count(len(run.seeds), "random seed"),
    ]
    return [part for part in parts if part]


def _amount(run: Run, key: str, noun: str) -> str:
    """Count something of the config, "12 to 24 clients" where a sweep varies it."""
    values = sorted({point.stored[key] for point in run.points}) if run.swept else [_number(run, key)]
    if len(values) > 1:
        return f"{values[0]:,} to {values[-1]:,} {noun}s"
    return count(values[0], noun)


def _number(run: Run, key: str) -> Any:
    """Return a number of the config; of the clusters, the number of true ones."""
    true = (run.config.get("data") or {}).get("distributions") if key == "clusters" else None
    return true or run.config.get(key)


def setting_of(run: Run) -> list[tuple[str, str]]:
    """List what was run: names and values of a table."""
    config = run.config
    graph = config.get("topology") or {}
    auto = config.get("clusters") == "auto"
    facts = {
        "experiment": f"{run.experiment}, {run.head.get('scale', 'default')} scale",
        "clients": f"{_amount(run, 'clients', 'client')}, {100 * config.get('participation', 1.0):g} % of them in "
        "every round",
        "clusters": f"{_number(run, 'clusters')}, k found by the clients" if auto else f"{config.get('clusters')}",
        "rounds": f"{config.get('rounds')}",
        "seeds": ", ".join(map(str, run.seeds)),
        "data": _options(config.get("data"), ("partition",), DataOptions.model_validate({}).model_dump(mode="json")),
        "model": _options(config.get("model"), ("hidden",), ModelOptions.model_validate({}).model_dump(mode="json")),
        "local training": _options(config.get("local"), ("steps", "learning_rate", "batch_size")),
        "mixing": _options(config.get("mixing"), ("weights",)),
        "graph": _options(graph, topology.USES.get(graph.get("name", ""), ())),
    }
    if points := virtual_points(run):
        mixed = run.swept and len(points) < len(run.points)
        where = " (at the first point with one; the points without a world ran in rounds)" if mixed else ""
        where = where or (" (at the first point)" if run.swept else "")
        facts["world"] = world_in_words(points[0].world or {}) + where
        facts["clock"] = _options(points[0].clock, tuple(points[0].clock))
    if run.swept:
        for key in run.varying:
            values = dict.fromkeys(write(point.at.get(key, "as in the base")) for point in run.points)
            facts[f"varied: {key}"] = ", ".join(values)
    else:
        for seed, entry in run.topology.items():
            facts[f"graph of seed {seed}"] = topology.summary(entry["facts"])
    return [(name, value) for name, value in facts.items() if value]


def _options(values: JsonObject | None, shown: Sequence[str], defaults: JsonObject | None = None) -> str:
    """Write a table of the config as "name, key value, ...": the keys to show, and what differs from its default."""
    values = values or {}
    parts = [str(values["name"])] if "name" in values else []
    for key, value in values.items():
        changed = defaults is not None and key != "name" and value != defaults.get(key)
        if (key in shown or changed) and value is not None:
            parts.append(f"{key.replace('_', ' ')} {in_words(value)}")
    return ", ".join(parts)


def in_words(value: Any) -> str:
    """Write a value of a config for people.

    >>> in_words({"kind": "none", "max_age": None}), in_words([[1, 2], [3, 4]]), in_words(True)
    ('(kind none)', '1 2, 3 4', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        known = [f"{key.replace('_', ' ')} {in_words(inner)}" for key, inner in value.items() if inner is not None]
        return f"({', '.join(known)})"
    if isinstance(value, list | tuple):
        nested = any(isinstance(inner, list | tuple) for inner in value)
        return (", " if nested else " ").join(map(in_words, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key} ")
        elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
            for number, inner in enumerate(value, start=1):
                yield from flat(inner if isinstance(inner, Mapping) else {"": inner}, f"{prefix}{key} {number}: ")
        elif value is not None:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def about_algorithm(run: Run, label: str) -> str:
    """Describe an algorithm; one with options of its own by these, "dfca-auto with momentum 0"."""
    name = base_of(label)
    options = (run.config.get("algorithm") or {}).get(label)
    given = ", ".join(f"{key} {value}" for key, value in flat(options or {}))
    if label != name:
        return f"{name} with {given}." if given else f"{name}."
    about = kind_of(name).about or "Not one of dfca's own algorithms."
    return f"{about} Here with {given}." if given else about


def changes_of(run: Run) -> list[tuple[str, str]]:
    """List what the command line changed (`--set`): keys, and their values with what the experiment itself says."""
    return [
        (change["key"], in_words(change["value"]) + (f" (instead of {in_words(was)})" if was is not None else ""))
        for change in run.head.get("changes", ())
        for was in (change.get("instead_of"),)
    ]
