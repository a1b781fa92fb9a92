"""Found a swarm, or make a device ready to join one: what `dfca node init` and `dfca node join` do with data.

config, facts = init_swarm(folder, identity.id, Founding(data="a.csv", label="activity"))
config = join_swarm(folder, facts, JoinPlan(data="b.csv"))
problems = check_fits(facts, config, folder)        # [] where all is well
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

from dfca.base.errors import ConfigError, DataError, DfcaError, unknown
from dfca.base.validation import check
from dfca.node.task.config import MODULE, DataConfig, NodeConfig, absolute
from dfca.node.task.csv_table import listed
from dfca.node.task.dataset import check_rows, load, matched, problems, request_of
from dfca.node.task.facts import ALGORITHMS, Facts, InputFacts, SwarmTask
from dfca.node.task.learner import build, check_tokens, code_digest, measured, trusted_codec, weights_digest
from dfca.node.task.reading import DataRequest as Request
from dfca.node.task.reading import Raw, found_classes, read
from dfca.node.task.scaling import measure

MODELS = ("mlp", "cnn", "cnn-tutorial", "cnn1d")
WINDOW, HORIZON = 16, 1  # of a forecast, where the founder says nothing


@dataclass(frozen=True)
class JoinPlan:
    """What the user says of a device; what is not said is found, or taken from the swarm.

    name: of the device, the folder's if not given. weights: the safetensors file that the model starts from.
    settings: any other keys of node.toml by section, e.g. {"network": {"port": 7447}}.
    """

    data: str
    label: str | None = None
    name: str | None = None
    test: str | None = None
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    drop_missing: bool = False
    factory: str | None = None
    weights: str | None = None
    settings: dict[str, Any] | None = None


@dataclass(frozen=True)
class Founding(JoinPlan):
    """What the founder says of the swarm as well.

    model: mlp, cnn, cnn1d or "module:function"; hidden: units of its hidden layers; classes: all that any device may
    ever have, those of the founder's data if not given; task: "regression" predicts the number in the label's column,
    "forecasting" the one `horizon` rows later from the last `window` rows, "multilabel" which of several columns
    ("a,b,c") are 1. agreed: any other facts, e.g. {"local": {"steps": 20}}.
    """

    swarm: str | None = None
    model: str = "mlp"
    hidden: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None
    clusters: int | None = None
    algorithm: str = "dfca-auto"
    task: str = "classification"
    window: int | None = None
    horizon: int | None = None
    seed: int = 0
    agreed: dict[str, Any] | None = None


def init_swarm(folder: Path, founder: str, options: Founding) -> tuple[NodeConfig, Facts]:
    """Settle the facts of a new swarm and the settings of its founder; reads the data, writes nothing.

    founder: the device ID, or the authority's ID. `node.disk.folder.write` writes both.

    Raises DfcaError with everything that is wrong.
    """
    _check_task(options)
    config = _config(folder, options, options.label or "label", ())
    raw = read(Request(config.data, folder, most_bytes=config.limits.data_bytes, task=options.task))
    inputs = _inputs(raw, config, options)
    check_rows(len(raw.x), inputs, config.data.path)
    agreed = options.agreed or {}
    if (codec := config.training.codec) is not None:
        agreed = {**agreed, "codec_digest": code_digest(codec)}
    facts = Facts.checked(
        {
            "name": options.swarm or config.name,
            "founder": founder,
            "seed": options.seed,
            "algorithm": options.algorithm,
            "clusters": options.clusters,
            **_defaults(options.algorithm, "private" in agreed),
            **agreed,
            "label": config.data.label,
            "inputs": inputs,
            "task": options.task,
            **_targets(raw, options, config.data),
            "scaling": measure(matched(raw, inputs), inputs.kind),
            "model": _model(options),
        }
    )
    facts = measured(facts, config.training.weights)
    samples = load(config, folder, facts)  # whatever is wrong with the held-out part or the test file is said now
    built = build(facts, facts.model.factory, config.training.weights)
    trusted_codec(facts, config.training.codec)
    if inputs.kind == "tokens":
        check_tokens(built, samples.train[0])
    return config, facts


def join_swarm(folder: Path, facts: Facts, options: JoinPlan) -> NodeConfig:
    """Settle the settings of a device that joins a swarm; reads the data, writes nothing.

    Raises DfcaError with everything that does not fit.
    """
    config = _config(folder, options, options.label or facts.label, facts.inputs.ignored)
    if wrong := check_fits(facts, config, folder):
        raise DataError(f"{options.data} does not fit the swarm {facts.name}: {'; '.join(wrong)}")
    return config


def check_fits(facts: Facts, config: NodeConfig, folder: Path) -> list[str]:
    """List everything about a device that does not fit a swarm: its data, and the model where it is code."""
    wrong: list[str] = []
    for path in [config.data.path, *([config.data.test] if config.data.test else [])]:
        data = config.data.changed(path=path)
        try:
            wrong += problems(read(request_of(config.changed(data=data), folder, facts)), facts)
        except DfcaError as error:
            wrong.append(str(error))
    try:
        model = build(facts, config.training.factory, config.training.weights)
        trusted_codec(facts, config.training.codec)
    except DfcaError as error:
        wrong.append(str(error))
    if not wrong:
        try:
            samples = load(config, folder, facts)
            if facts.inputs.kind == "tokens":
                check_tokens(model, samples.train[0])
        except DfcaError as error:
            wrong.append(str(error))
    return wrong


def _config(folder: Path, options: JoinPlan, label: str, ignored: tuple[str, ...]) -> NodeConfig:
    """Make the settings from what the user typed; paths become absolute, as the node may start elsewhere."""
    data: dict[str, Any] = {
        "path": absolute(options.data),
        "label": label,
        "features": options.features or "auto",
        "ignore": tuple(dict.fromkeys([*ignored, *options.ignore])),
        "missing": "drop" if options.drop_missing else "refuse",
        "test": None if options.test is None else absolute(options.test),
    }
    model, codec = None, None
    if isinstance(options, Founding):
        model, codec = options.model, (options.agreed or {}).get("codec")
    content: dict[str, Any] = {
        "name": options.name or _name(folder),
        "data": data,
        "training": {
            "factory": options.factory or _code(model),
            "codec": _code(codec),
            "weights": None if options.weights is None else absolute(options.weights),
        },
    }
    for section, values in (options.settings or {}).items():
        if isinstance(values, dict):
            content[section] = {**content.get(section, {}), **values}
        else:
            content[section] = values
    return NodeConfig.checked(content, "the settings")


def _code(name: Any) -> str | None:
    """Return what the founder names for all members, if it is code."""
    return name if isinstance(name, str) and MODULE.match(name) else None


def _name(folder: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-._")[:63]
    if not name:
        raise ConfigError(f"{folder} makes no name for a device; give one by --name")
    return name


def _defaults(algorithm: str, private: bool) -> dict[str, Any]:
    """Settle what a new swarm does unless it agrees on something else.

    It guards folds of whole models; whether it merges clusters and takes a personal last step is the algorithm's. Facts
    refuse an algorithm that does not exist.
    """
    from dfca import algorithms

    if algorithm not in ALGORITHMS:
        return {"merging": None, "personal": 0}
    record = algorithms.get(algorithm)
    return {
        "merging": None if record.merging is None else {},
        "personal": record.personal_steps,
        "robust": "clip" if record.exchange == "gossip" and not private else "none",
    }


def _inputs(raw: Raw, config: NodeConfig, options: Founding) -> InputFacts:
    content: dict[str, Any] = {"shape": raw.x.shape[1:], "kind": raw.kind}
    if raw.names is not None:
        content = {"features": raw.names, "ignored": config.data.ignore}
    if options.task == "forecasting":
        window, horizon = options.window or WINDOW, options.horizon or HORIZON
        content |= {"kind": "series", "window": window, "horizon": horizon}
    return check(content, InputFacts, "the samples")


def _check_task(options: Founding) -> None:
    if options.task not in (tasks := get_args(SwarmTask)):
        raise unknown("task of a swarm", options.task, tasks)
    if options.task == "multilabel" and options.classes is not None:
        raise ConfigError("--classes is for a classification; --label A,B names the columns of several labels")
    if options.task != "classification" and options.classes is not None:
        raise ConfigError(f"--classes is for a classification; a {options.task} predicts numbers, leave it out")
    if options.task != "forecasting" and (options.window or options.horizon):
        raise ConfigError(f'--window and --horizon are for "forecasting", the task is "{options.task}"; leave them out')


def _targets(raw: Raw, options: Founding, data: DataConfig) -> dict[str, Any]:
    """Settle what is predicted: the classes or labels, or how the numbers are scaled."""
    if raw.targets is None:
        return {"classes": _classes(raw, options, data.path)}
    if options.task == "multilabel":
        return {"classes": raw.target_names}
    known = raw.targets[:, 0].tolist()
    spread = pstdev(known)
    return {"target": {"mean": fmean(known), "scale": spread if spread > 1e-12 * max(map(abs, known)) else 1.0}}


def _classes(raw: Raw, options: Founding, what: str) -> tuple[str, ...]:
    labels = sorted(set(raw.labels or ()))
    if options.classes is None:
        return found_classes(labels, what)
    if missing := [name for name in labels if name not in options.classes]:
        raise DataError(f"{what} has the classes {listed(missing)}, which --classes does not name")
    return options.classes


def _model(options: Founding) -> dict[str, Any]:
    chosen: dict[str, Any] = {"name": options.model}
    if MODULE.match(options.model):
        chosen = {"name": "factory", "factory": options.model}
    elif options.model not in MODELS:
        raise unknown("model", options.model, [*MODELS, "module:function"])
    elif options.hidden is not None:
        chosen["hidden"] = options.hidden
    if options.weights is not None:
        chosen["weights"] = weights_digest(options.weights)
    return chosen
