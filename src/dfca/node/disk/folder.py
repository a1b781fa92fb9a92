"""The folder of a node.

node.toml                  its settings                  facts.json    what its swarm shares
key.pem, certificate.pem   who it is                     roster.json   who belongs to the swarm
state/                     its models (`store`)          partial/      models on their way here
control.json               how to reach it while it runs status.json   its last status
node.log                   what it did                   lock          held while it runs
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import Timeout

from dfca.base.errors import ConfigError, DataError, RunError
from dfca.base.files import atomic_write, read_small
from dfca.node.disk.save_file import STATE
from dfca.node.disk.store import DiskStore
from dfca.node.operate.control import LOCK
from dfca.node.surroundings import SYSTEM, Surroundings
from dfca.node.task.config import FILE as CONFIG_FILE
from dfca.node.task.config import NodeConfig
from dfca.node.task.facts import LARGEST, Facts
from dfca.node.trust.identity import KEY_FILE, Identity, short
from dfca.node.trust.roster import Roster

if TYPE_CHECKING:
    from dfca.core.codec import Codec
    from dfca.core.learning.parts import Layout
    from dfca.node.task.learner import Architecture

FACTS = "facts.json"
ROSTER = "roster.json"


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder, read and checked."""

    path: Path
    config: NodeConfig
    identity: Identity
    facts: Facts
    roster: Roster
    around: Surroundings = SYSTEM

    @classmethod
    def load(cls, path: Path) -> NodeFolder:
        """Read a folder. Raises DfcaError if something is missing, damaged, or does not fit."""
        config, identity = NodeConfig.load(path), Identity.load(path)
        facts, roster = load_facts(path), Roster.load(path / ROSTER)
        if roster.swarm != facts.swarm_id or roster.root != facts.founder:
            raise DataError(
                f"{FACTS} and {ROSTER} in {path} are of two swarms ({short(facts.swarm_id)}, {short(roster.swarm)}); "
                "restore both from the same copy, or pair this device again in an empty folder"
            )
        folder = cls(path, config, identity, facts, roster)
        folder.check_member()
        return folder

    @cached_property
    def model(self) -> Architecture:
        """The model of the swarm, built once. Raises DfcaError where it is another one, or its code is not trusted."""
        from dfca.node.task.learner import build

        return build(self.facts, self.config.training.factory, self.config.training.weights)

    @cached_property
    def codec(self) -> Codec | None:
        """What codes the models that are sent. Raises ConfigError where it is code that is not trusted."""
        from dfca.node.task.learner import trusted_codec

        return trusted_codec(self.facts, self.config.training.codec)

    @property
    def layout(self) -> Layout | None:
        """Which columns of a model this device keeps to itself; None: none."""
        from dfca.core.learning.parts import layout_of

        return None if self.facts.private is None else layout_of(self.model.flat, self.facts.make_algorithm())

    def check_member(self) -> None:
        """Raise ConfigError if this device is not a member of the swarm (any more)."""
        if self.roster.member(self.identity.id) is not None:
            return
        if self.roster.is_removed(self.identity.id):
            raise ConfigError(
                f"this device ({short(self.identity.id)}) was removed from the swarm {self.facts.name}; that is "
                "final: make a new one in an empty folder and pair it, if it may come back"
            )
        raise ConfigError(
            f"this device ({short(self.identity.id)}) is not in the roster of the swarm {self.facts.name}; restore "
            f"{ROSTER}, or pair it again in an empty folder"
        )

    def store(self) -> DiskStore:
        """Open the store of its models."""
        return DiskStore(self.path / STATE, disk=self.around.disk, now=self.around.wall)

    def save_roster(self) -> None:
        """Write the roster if it has changed."""
        if self.roster.changed:
            self.roster.save(self.path / ROSTER, self.around.disk)

    def lock(self) -> AbstractContextManager[object]:
        """Take the folder for this process, until the end of a block. Raises RunError if another one has it."""
        try:
            lock = self.around.disk.lock(self.path / LOCK)
        except Timeout:
            raise InUse(
                f"the node in {self.path} runs already; stop it first, or look at it with: dfca node status {self.path}"
            ) from None
        except OSError as error:
            raise RunError(f"cannot write in {self.path}: {error.strerror}; make the folder writable") from error
        self.around.disk.remove_leftovers(self.path)
        return lock


class InUse(RunError):
    """Another process runs this node."""

    status = 2


def prepare(path: Path) -> None:
    """Make the folder of a new node, readable by its owner only. Raises ConfigError if it is not empty."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror}; choose another one") from error
    if CONFIG_FILE in names or KEY_FILE in names:
        raise ConfigError(f"there is a node in {path} already; choose another folder, or remove that one")
    if names:
        raise ConfigError(f"{path} is not empty ({sorted(names)[0]}); a node needs a folder of its own: choose another")


def write(path: Path, config: NodeConfig, facts: Facts, roster: Roster) -> None:
    """Write a new node; its settings come last, so that a folder with settings is complete."""
    atomic_write(path / FACTS, facts.to_bytes())
    roster.save(path / ROSTER)
    config.save(path)


def load_facts(path: Path) -> Facts:
    """Read the facts of a node's swarm."""
    try:
        data = read_small(path / FACTS, LARGEST)
    except FileNotFoundError:
        raise DataError(f"{path / FACTS} does not exist; restore it, or pair this device again") from None
    except OSError as error:
        raise RunError(f"cannot read {path / FACTS}: {error.strerror}; restore it from any member") from error
    return Facts.from_bytes(data)
