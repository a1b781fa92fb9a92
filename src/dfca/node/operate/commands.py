"""What the commands of `dfca node` do with a folder while no node runs there: make one, use its models."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfca.base.errors import ConfigError, DataError, RunError
from dfca.base.validation import parse_toml
from dfca.node.addresses import own_addresses
from dfca.node.disk import folder as folders
from dfca.node.disk.folder import NodeFolder
from dfca.node.task.config import NodeConfig
from dfca.node.task.facts import Facts
from dfca.node.task.founding import Founding, JoinPlan, init_swarm, join_swarm
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster


@dataclass(frozen=True)
class Made:
    """A new node."""

    identity: Identity
    config: NodeConfig
    facts: Facts
    code: str = ""  # the six characters of the pairing
    inviter: str = ""  # who introduced it


def init_node(path: Path, options: Founding) -> Made:
    """Make the first node of a new swarm. If that fails, the folder is as it was."""
    existed = path.exists()
    folders.prepare(path)
    try:
        identity = Identity.create(path)
        config, facts = init_swarm(path, identity.id, options)
        roster = Roster.found(identity, facts.swarm_id, config.name)
        folders.write(path, config, facts, roster)
    except BaseException:
        _undo(path, existed)
        raise
    return Made(identity, config, facts)


def join_node(path: Path, invite: str, options: JoinPlan) -> Made:
    """Make a node and pair it; its data is checked against the swarm's facts before it becomes a member.

    If that fails, the folder is as it was.
    """
    from dfca.node.trust.invite import Invite
    from dfca.node.trust.joining import join

    Invite.parse(invite)  # check it before anything is made
    existed = path.exists()
    folders.prepare(path)
    made: list[tuple[NodeConfig, Facts]] = []

    def check_facts(data: bytes) -> None:
        facts = Facts.from_bytes(data)
        made.append((join_swarm(path, facts, options), facts))

    try:
        identity = Identity.create(path)
        name = options.name or path.resolve().name
        joined = asyncio.run(join(invite, identity, name, _addresses(options), check_facts))
        config, facts = made[0]
        if joined.roster.swarm != facts.swarm_id or joined.roster.root != facts.founder:
            raise DataError(
                "the inviter's roster is not that of the swarm whose facts it sent; do not trust this invite"
            )
        folders.write(path, config, facts, joined.roster)
    except BaseException:
        _undo(path, existed)
        raise
    return Made(identity, config, facts, joined.code, joined.inviter.name)


def _undo(path: Path, existed: bool) -> None:
    """Remove what was made in a folder that was empty before."""
    with suppress(OSError):
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if not existed:
            path.rmdir()


def _addresses(options: JoinPlan) -> tuple[str, ...]:
    """Return the future addresses of a device that has not started: others may have to dial it first."""
    given = options.settings or {}
    data = {"path": options.data, **given.get("data", {})}
    config = NodeConfig.checked({"name": "device", **given, "data": data}, "the settings")
    return own_addresses(config, config.network.port) if config.network.port else ()


def parse_settings(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Parse KEY=VALUE pairs, with dots for sections and values as in TOML; words need no quotes.

    >>> parse_settings(["network.port=7500", "name=shed"], "--set")
    {'network': {'port': 7500}, 'name': 'shed'}
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(part.replace("_", "").isalnum() for part in parts):
            raise ConfigError(f'{option} takes KEY=VALUE, such as network.port=7500, got "{pair}"')
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = text.strip()
        section = settings
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f'{option} {pair}: "{part}" was given a value before')
        section[parts[-1]] = value
    return settings


def load_model(path: Path, cluster: int | None = None, shared: bool = False) -> Any:
    """Load one saved model of a node: a `task.export.Exported`.

    cluster: which, as the swarm has it; None: that of the node's cluster, after its personal last step unless `shared`.
    Raises RunError if there is no model yet, DataError if the samples for the personal step cannot be read.
    """
    from dfca.core.rules.merging import hide_closed
    from dfca.node.task.dataset import load
    from dfca.node.task.export import Exported, personalised
    from dfca.node.task.learner import build, choose_cluster
    from dfca.peer.records.lineage import layout_of

    folder = NodeFolder.load(path)
    saved = folder.store().load()
    if saved is None or saved.bank is None:
        raise RunError(
            f"the node in {path} has no models yet; let it run until `dfca node status {path}` shows a round"
        )
    training = folder.config.training
    model = build(folder.facts, training.factory, training.weights)
    if saved.bank.shape[1] != model.flat.size:
        raise DataError(
            f"the saved models have {saved.bank.shape[1]} floats and the swarm's model {model.flat.size}; the folder "
            "was mixed up with another one: restore it from a copy"
        )
    own = cluster is None and not shared
    if cluster is None:
        cluster = saved.assignment
    if cluster is None:
        bank = hide_closed(saved.bank, layout_of(saved.lineage).closed)
        cluster = choose_cluster(model, bank, load(folder.config, path, folder.facts).train)
    if not 0 <= cluster < len(saved.bank):
        raise ConfigError(f"--cluster must be 0 to {len(saved.bank) - 1}, got {cluster}")
    exported = Exported(folder.facts, model, saved.bank[cluster].clone(), cluster, saved.round)
    steps = folder.facts.personal if folder.facts.personal != "auto" else saved.curves.steps
    if not own or not steps:
        return exported
    try:
        samples = load(folder.config, path, folder.facts)
    except DataError as error:
        raise DataError(f"{error}; the personal last step needs the samples: --shared does without it") from None
    return personalised(exported, samples, folder.identity.number, steps)


def predict_file(path: Path, data: str, cluster: int | None = None, shared: bool = False) -> tuple[str, Any]:
    """Predict the samples of a file with a node's model; returns CSV and the model."""
    from dfca.node.task import export

    folder = NodeFolder.load(path)
    absolute = Path(data).expanduser().absolute()
    if not absolute.exists():
        raise DataError(f"{absolute} does not exist; give a file of samples to predict, in the form of the node's data")
    exported = load_model(path, cluster, shared)
    return export.predict_file(exported, str(absolute), folder.config, path), exported
