"""The tables `[world]` and `[clock]` of an experiment: with a world, its trials run in virtual time.

    [world]
    preset = "wifi"            # what is not given below is the preset's; without a preset the world is ideal
    [world.compute]
    slowdown = 10              # of `slow_share` of the clients
    [clock]
    until_s = 600

A key that is absent has the preset's value, so that a sweep may vary `world.preset`; `Config.digest` and the summary
hold the resolved world (`WorldConfig.facts`), with every number.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from dfca.base.errors import ConfigError
from dfca.base.table import SIGNS, Table, fields_of, option
from dfca.sim.events.availability import read_availability
from dfca.sim.events.options import ClockOptions, EventOptions
from dfca.sim.events.world import (
    Churn,
    Compute,
    Devices,
    Faults,
    LateJoiner,
    Link,
    Partition,
    World,
    check_clients,
    preset,
)
from dfca.sim.events.world import presets as world_presets
from dfca.sim.metrics_table import without_nan

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Bandwidth = Positive | Literal["unlimited"]
ClientNumber = Annotated[int, Field(ge=0)]
SLOW_SHARE = 0.1  # of the clients, where only a slowdown is given


class PartialTable(Table):
    """A table of which every key may be left out: `class LinkConfig(PartialTable, of=Link)` has the keys of `Link`."""

    def __init_subclass__(cls, of: type[Table]) -> None:
        """Declare what the class does not declare itself."""
        hints, own = get_type_hints(of, include_extras=True), cls.__annotations__
        inherited = {field.name: field for field in fields_of(of) if field.name not in own}
        for name, field in inherited.items():
            bounds = {key: value for key, value in field.metadata.items() if key in SIGNS}
            own[name] = Annotated[hints[name], Field(**bounds)] | None
            about = {key: value for key, value in field.metadata.items() if key in ("description", "strict")}
            setattr(cls, name, option(default=None, **about))
        super().__init_subclass__()

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class ComputeConfig(PartialTable, of=Compute):
    """How long a client computes; `slow_share` of the clients take `slowdown` times as long, or `devices` says who."""

    slow_share: Fraction | None = option(default=None, description="share of the clients that are slow")
    slowdown: Positive | None = option(default=None, description="how many times as long they take")

    def __post_init__(self) -> None:
        given = self.given()
        if "devices" in given and {"slow_share", "slowdown"} & set(given):
            raise ConfigError(
                "world.compute has slow_share or slowdown and devices, which both say who is slow; leave one out"
            )
        if (total := sum(devices.share for devices in given.get("devices", ()))) > 1 + 1e-9:
            raise ConfigError(f"the shares of world.compute.devices must add up to at most 1, got {total:g}")

    def over(self, below: Compute) -> Compute:
        """Lay what is given over the preset's."""
        given = self.given()
        slow = {
            key: given.pop(name) for key, name in (("share", "slow_share"), ("slowdown", "slowdown")) if name in given
        }
        if slow:
            first = below.devices[0] if below.devices else Devices(SLOW_SHARE, 1.0)
            given["devices"] = (first.changed(**slow), *below.devices[1:])
        return below.changed(**given)


class UplinkConfig(Table):
    """A client whose bandwidth is another."""

    client: ClientNumber = option(description="its number")
    bandwidth_bytes_s: Bandwidth = option(description="of its uplink")


class LinkConfig(PartialTable, of=Link):
    """How a message travels."""

    bandwidth_bytes_s: Bandwidth | None = option(
        default=None, description='of a client\'s uplink, which its messages share; or "unlimited"'
    )
    uplinks: tuple[UplinkConfig, ...] | None = option(
        default=None, strict=False, description="clients with another bandwidth"
    )

    def over(self, below: Link) -> Link:
        given = self.given()
        if self.bandwidth_bytes_s is not None:
            given["bandwidth_bytes_s"] = _number(self.bandwidth_bytes_s)
        if self.uplinks is not None:
            given["uplinks"] = tuple((uplink.client, _number(uplink.bandwidth_bytes_s)) for uplink in self.uplinks)
        return below.changed(**given)


class FaultsConfig(PartialTable, of=Faults):
    """The probabilities that a message is lost, arrives twice, or arrives broken."""


class ChurnConfig(PartialTable, of=Churn):
    """Clients leave and return: `leaves_per_s` each, or so that the share `away` of them is away on average."""

    away: Annotated[float, Field(ge=0, lt=1)] | None = option(
        default=None, description="share of the clients away on average"
    )

    def __post_init__(self) -> None:
        if {"away", "leaves_per_s"} <= set(self.given()):
            raise ConfigError(
                "world.churn has away and leaves_per_s, which both say how often clients leave; leave one out"
            )

    def over(self, below: Churn) -> Churn:
        given = self.given()
        away = given.pop("away", None)
        churn = below.changed(**given)
        return churn if away is None else Churn.of_share(away, churn.away_s, churn.keeps)


class PartitionConfig(Table):
    """No message passes between groups from begin_s to end_s (never healed without it).

    Either `groups` of clients (those in none are one group), or `parts`: clients 0..N-1 cut into equal runs.
    """

    begin_s: float = option(ge=0, description="when it begins")
    end_s: Positive | None = option(default=None, description="when it heals; default: never")
    groups: tuple[Annotated[tuple[ClientNumber, ...], Field(strict=False)], ...] | None = option(
        default=None, strict=False, description="lists of clients; those in none are one more group"
    )
    parts: int | None = option(default=None, ge=2, description="number of equal runs of clients, instead of groups")

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.parts is None):
            raise ConfigError(
                "a partition needs groups, such as [[0, 1, 2]], or parts, such as 2; "
                f"got {'neither' if self.groups is None else 'both'}"
            )
        self.over(self.parts or 0)

    def over(self, clients: int) -> Partition:
        """Resolve for that many clients."""
        groups = self.groups
        if groups is None:
            bounds = [clients * part // (self.parts or 1) for part in range((self.parts or 1) + 1)]
            groups = tuple(tuple(range(low, high)) for low, high in pairwise(bounds))
        return Partition(self.begin_s, math.inf if self.end_s is None else self.end_s, groups)


class TimelineConfig(Table):
    """Which part of a run the report draws as lanes."""

    begin_s: float = option(default=0.0, ge=0, description="from when on")
    span_s: Positive | None = option(
        default=None, description="for how long; default: the warm-up, if any, and some rounds"
    )
    clients: tuple[ClientNumber, ...] | None = option(
        default=None, strict=False, description="whose lanes; default: clients that something happens to"
    )
    lanes: int = option(default=8, ge=2, le=40, description="how many lanes")


class WorldConfig(Table):
    """The world that the clients run in, in virtual time (`sim.events.world`)."""

    preset: str = option(default="ideal", description="what is not given is the preset's: `dfca list` shows them")
    trace: bool = option(default=False, description="keep every event, for `dfca replay`")
    compute: ComputeConfig | None = None
    link: LinkConfig | None = None
    faults: FaultsConfig | None = None
    churn: ChurnConfig | None = None
    partitions: tuple[PartitionConfig, ...] | None = option(
        default=None, strict=False, description="times without some links"
    )
    late_joiners: tuple[LateJoiner, ...] | None = option(
        default=None, strict=False, description="clients that come later"
    )
    availability: str | None = option(
        default=None, description="path of a file with the times at which each client is there"
    )
    timeline: TimelineConfig | None = None

    def __post_init__(self) -> None:
        preset(self.preset)

    def over(self, clients: int) -> World:
        """Resolve: the preset with everything given laid over it, for that many clients.

        Raises ConfigError where a table names a client that is not there, or clients cannot run in this world.
        """
        world = preset(self.preset)
        return world.changed(
            compute=self.compute.over(world.compute) if self.compute else world.compute,
            link=self.link.over(world.link) if self.link else world.link,
            faults=world.faults.changed(**self.faults.given()) if self.faults else world.faults,
            churn=self.churn.over(world.churn) if self.churn else world.churn,
            partitions=tuple(partition.over(clients) for partition in self.partitions or ()),
            late_joiners=self.late_joiners or (),
            absences=() if self.availability is None else read_availability(self.availability),
        )

    def facts(self, clients: int) -> dict[str, Any]:
        """Return every number of the resolved world as JSON knows it; an infinite one is null.

        The lines of an availability file, which can be thousands, are there as a checksum.
        """
        facts: dict[str, Any] = without_nan(self.over(clients).as_of(2))
        absences = facts.pop("absences")
        if absences:
            facts["absences_sha256"] = hashlib.sha256(json.dumps(absences).encode()).hexdigest()
        return facts


class ClockConfig(ClockOptions, kw_only=True):
    """The clock of an experiment, with a goal: tables show when it was reached."""

    target_accuracy: Fraction | None = option(default=None, description="tables show when it was reached, 0 to 1")
    target: float | None = option(
        default=None, description="the same for a task with another metric: a value of it, such as an RMSE"
    )

    def event_options(self, rounds: int) -> EventOptions:
        return self.narrowed(EventOptions, rounds=rounds)


def worlds() -> dict[str, dict[str, Any]]:
    """Return the facts of every preset of a world by its name."""
    return {name: WorldConfig(preset=name).facts(1) for name in world_presets()}


def check_world(world: WorldConfig | None, clock: ClockConfig | None, clients: int) -> None:
    """Check both tables against the number of clients, before anything runs.

    Raises ConfigError for a clock without a world; a client that is not there; a churn that empties the network; a
    timeout shorter than any latency.
    """
    if world is None:
        if clock is not None:
            raise ConfigError(
                '[clock] needs a [world], which makes a run happen in virtual time; add [world] with preset = "ideal", '
                "or leave [clock] out"
            )
        return
    timeout_s = None if clock is None else clock.timeout_s
    # The graph and the model are not known yet: full links and a model of no bytes bound what they will be.
    world.over(clients).check([1] * clients, 0, timeout_s)
    if world.timeline is not None:
        check_clients("world.timeline.clients", world.timeline.clients or (), clients)


def _number(bandwidth: float | str) -> float:
    return math.inf if bandwidth == "unlimited" else float(bandwidth)
