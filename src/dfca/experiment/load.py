"""Read an experiment: a preset or a TOML file, a scale of it, and what the command line changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from dfca.base.device import find_device
from dfca.base.errors import ConfigError, unknown
from dfca.base.imports import look_in
from dfca.base.renamed import renamed
from dfca.base.validation import DEEPEST, parse_toml, show
from dfca.experiment.config import Config
from dfca.experiment.sweep import NO_SWEEP, Point, Sweep
from dfca.experiment.variants import flatten, merge, nest, rejoin, unfold
from dfca.model_options import ModelOptions, start_digests

TEXT = "text"  # the recipe of a file without any


@dataclass(frozen=True)
class Experiment:
    """A config with the name and the scale it came from, and the sweep over it where there is one.

    folder: of the experiment file, where modules of the user's own are looked for.
    """

    name: str
    scale: str
    config: Config
    sweep: Sweep = NO_SWEEP
    folder: Path | None = None
    changes: tuple[dict[str, Any], ...] = ()  # by `overrides`: key, value, instead_of (None: the default)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Return the points, at least one."""
        return self.sweep.expand(self.config)

    def to_toml(self) -> str:
        """Write the complete config and the sweep over it: `read_stored` reads it."""
        return self.config.to_toml() if not self.sweep else tomli_w.dumps(self.config.values() | self.sweep.values())


def presets() -> dict[str, str]:
    """Return the title of each preset by its name."""
    tables = {name: _parse(text, name) for name, text in sorted(_preset_texts().items())}
    return {name: fill_in(values.get("title", ""), values) for name, values in tables.items()}


def fill_in(text: str, values: Mapping[str, Any]) -> str:
    """Replace each "{key}" of a title or description by the value of that key; what is no key of the values stays.

    >>> fill_in("{clients} clients at {local.steps} steps, {x}", {"clients": 24, "local": {"steps": 5}})
    '24 clients at 5 steps, {x}'
    """
    flat = flatten(dict(values))
    return re.sub(r"\{([a-z_][a-z_.]*)\}", lambda match: str(flat.get(match[1], match[0])), text)


def preset_text(name_or_path: str | Path) -> str:
    """Return a preset, or an experiment file, as it is written. Raises ConfigError if there is none."""
    return _text(name_or_path)[1]


def load_experiment(
    name_or_path: str | Path,
    scale: str | None = None,
    overrides: Sequence[str] = (),
    algorithms: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    device: str | None = None,
    recipe: str | None = None,
    extras: bool = False,
) -> Experiment:
    """Read a preset by its name or an experiment file by its path, and apply what the command line changes.

    A file may hold tables `[scale.desk]`, `[scale.paper]`, ...: the one asked for (desk if none is) is laid over the
    rest. It may also hold ways to train, `[recipe.NAME]`, which are laid over it before the scale: the one asked for,
    else the one that the scale names (`recipe = "NAME"`), else the first. "text" is the file without any of them.
    `extras = [...]` are more rows of the same form as `algorithms`, each with what its algorithm has beyond the others
    (momentum, a last step): they run where `extras` asks for them, or `algorithms` names them. `overrides` are
    "key=value" with dotted keys and TOML values, and come last but for the named arguments; with a sweep they change
    its base, and `grid.KEY=[...]` its grid. Raises ConfigError for an unknown preset, key or scale, a value out of
    range, or a device that is not here.
    """
    name, values = _read(name_or_path)
    folder = None if _is_preset(name_or_path) else Path(name_or_path).resolve().parent
    if folder is not None:
        look_in(folder)  # modules of the user's own stand beside the file that names them
    scale, values = _choose_scale(_choose_recipe(values, scale, recipe), scale)
    before, changed = flatten(values), flatten(reduce(merge, map(_parse_override, overrides), {}))
    changes = tuple({"key": key, "value": value, "instead_of": before.get(key)} for key, value in changed.items())
    for override in overrides:
        values = merge(values, _parse_override(override))
    values = _choose_rows(values, algorithms, extras)
    if algorithms is not None:
        algorithms = values["algorithms"]
    named = {"algorithms": algorithms, "seeds": seeds, "device": device}
    given = {k: v if isinstance(v, int | str) else list(v) for k, v in named.items() if v is not None}
    sweep, values = split_sweep(values | given)
    _refuse_overridden(changed, sweep)
    sweep = Sweep(sweep.grid, tuple({k: v for k, v in table.items() if k not in given} for table in sweep.points))
    config = sweep.base(values)
    texts = {key: fill_in(getattr(config, key), config.values()) for key in ("title", "description")}
    experiment = Experiment(name, scale, config.model_copy(update=texts), sweep, folder, changes)
    metrics = sorted({point.config.metric.name for point in experiment.points})
    if len(metrics) > 1:
        raise ConfigError(f"a sweep compares one metric, got {' and '.join(metrics)}; run one after the other")
    experiment = _on_this_machine(experiment)  # after every point is checked: a typing mistake does not wait for torch
    for point in experiment.points:
        point.config.check_imports()
    return experiment


def _on_this_machine(experiment: Experiment) -> Experiment:
    """Settle the device, and note which files models start from.

    Raises ConfigError or ModelError for what is not here.
    """
    config = experiment.config
    here = {"device": find_device(config.device), "model": _with_digests(config.model, experiment.sweep)}
    settled = config.model_copy(update=here)
    return experiment if settled == config else replace(experiment, config=settled)


def _is_preset(name_or_path: str | Path) -> bool:
    return not str(name_or_path).endswith(".toml") and Path(name_or_path).name == str(name_or_path)


def read_stored(text: str) -> tuple[Config, Sweep]:
    """Read what `Experiment.to_toml` wrote. Raises ConfigError if somebody changed it."""
    sweep, values = split_sweep(renamed(_parse(text, "config.toml")))
    return Config.of(values), sweep


def split_sweep(values: Mapping[str, Any]) -> tuple[Sweep, dict[str, Any]]:
    """Take the tables of a sweep out of the values of an experiment file."""
    return Sweep.of(values), {key: value for key, value in values.items() if key not in ("grid", "points")}


def _read(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    name, text = _text(name_or_path)
    values, path = _parse(text, name), Path(name)
    of_run = path.name == "config.toml" and path.with_name("environment.json").is_file()  # perhaps of an older version
    return path.stem, renamed(values) if of_run else values


def _text(name_or_path: str | Path) -> tuple[str, str]:
    """Return the name of a preset, or the path of a file, and its text."""
    path = Path(name_or_path)
    if _is_preset(name_or_path):
        texts = _preset_texts()
        if path.name not in texts:
            file = path.parent / f"{path.name}.toml"
            if file.is_file():
                raise ConfigError(f'unknown preset "{path.name}"; for the experiment file here write {file}')
            error = unknown("preset", path.name, texts)
            raise ConfigError(f"{error}; or give the path of an experiment file that ends in .toml")
        return path.name, texts[path.name]
    if path.is_dir():
        inside = f"; that of this run is {path / 'config.toml'}" if (path / "config.toml").is_file() else ""
        raise ConfigError(f"{path} is a folder; give a preset or an experiment file that ends in .toml{inside}")
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        presets = ", ".join(sorted(_preset_texts()))
        raise ConfigError(f"cannot read the experiment file {path}: {reason}; the presets are: {presets}") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:  # also a number of 5,000 digits, and 1,000 brackets
        raise ConfigError(f"{name} is not valid TOML: {error}") from None


def _preset_texts() -> dict[str, str]:
    folder = files("dfca.experiment") / "presets"
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in entries}


def _choose_recipe(values: dict[str, Any], scale: str | None, recipe: str | None) -> dict[str, Any]:
    """Lay a recipe over the rest; it may have scales of its own."""
    recipes, scales = values.pop("recipe", {}), values.get("scale", {})
    if not isinstance(recipes, dict) or not all(isinstance(table, dict) for table in recipes.values()):
        raise ConfigError(f"recipe must be a table of tables ([recipe.authors]), got {show(recipes)}")
    if recipe is not None and not recipes:
        raise ConfigError(f'this experiment has no recipes, got --recipe "{recipe}"; leave --recipe out')
    size = scales.get(scale or "desk") if isinstance(scales, dict) else None
    usual = size.pop("recipe", None) if isinstance(size, dict) else None
    known = {**recipes, TEXT: {}}
    name = recipe or usual or next(iter(known))
    if name not in known:
        raise unknown("recipe", name, known)
    return merge(values, known[name])


def _choose_scale(values: dict[str, Any], scale: str | None) -> tuple[str, dict[str, Any]]:
    scales = values.pop("scale", {})
    if not isinstance(scales, dict) or not all(isinstance(table, dict) for table in scales.values()):
        raise ConfigError(f"scale must be a table of tables ([scale.desk], [scale.paper]), got {show(scales)}")
    if scale is None:
        scale = "desk" if "desk" in scales else "default"
    if scale == "default":
        return scale, values
    if scale not in scales:
        if not scales:
            raise ConfigError(f'this experiment has no scales, got --scale "{scale}"; leave --scale out')
        raise unknown("scale", scale, scales)
    return scale, merge(values, scales[scale])


def _choose_rows(values: dict[str, Any], names: Sequence[str] | None, extras: bool) -> dict[str, Any]:
    """Unfold the rows of a file and its extras, and choose among them.

    Options of all rows stay, so that trials are the same whichever rows run.
    """
    more, listed = values.pop("extras", []), values.get("algorithms")
    if not isinstance(more, list):
        raise ConfigError(f"extras must be a list like algorithms, got {show(more)}")
    if extras and not more:
        raise ConfigError("this experiment has no extras, got --extras; leave it out")
    if not isinstance(listed, list):
        return unfold(values)
    full = unfold({**values, "algorithms": [*listed, *more]})
    if names is not None:
        tables = full.get("algorithm", {})
        return {**full, "algorithms": rejoin(names, tables) if isinstance(tables, dict) else list(names)}
    return full if extras else {**full, "algorithms": full["algorithms"][: len(listed)]}


def _parse_override(override: str) -> dict[str, Any]:
    """Parse "a.b=value" into nested tables; a value that is not TOML is a plain string.

    >>> _parse_override("local.learning_rate=0.05"), _parse_override("data.name=mnist")
    ({'local': {'learning_rate': 0.05}}, {'data': {'name': 'mnist'}})
    """
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f'--set needs key=value, got "{override}"; for example --set local.learning_rate=0.05')
    if len(parts) > DEEPEST:
        raise ConfigError(f"--set takes a key of at most {DEEPEST} parts, got {len(parts)}")
    if parts[0] == "scale":
        raise ConfigError(f'--set cannot change a scale, got "{override}"; use --scale NAME')
    return nest({".".join(parts): parse_value(text.strip())})


def _refuse_overridden(changed: Iterable[str], sweep: Sweep) -> None:
    """A key that every point sets cannot be changed in the base: say what can."""
    for key in changed:
        if key in sweep.grid:
            raise ConfigError(
                f"{key} varies in the grid of this experiment; use --set grid.{key}={show(sweep.grid[key])}"
            )
        if sweep.points and all(key in table for table in sweep.points):
            raise ConfigError(f"{key} is set by each of the [[points]] of this experiment; change it in a file")


def _with_digests(model: ModelOptions, sweep: Sweep) -> ModelOptions:
    """Note which files models start from, unless they vary."""
    varied = any("model.start_from" in table for table in (sweep.grid, *sweep.points))
    if model.start_from is None or model.start_sha256 is not None or varied:
        return model
    return model.model_copy(update={"start_sha256": start_digests(model)})


def parse_value(text: str) -> Any:
    """Parse a value of the command line: TOML, or else a plain string."""
    try:
        values = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text
