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
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dfca.base.errors import ConfigError
from dfca.peer.records.staleness import Staleness, StalenessKind, StalenessUnit
from dfca.sim.events.availability import read_availability
from dfca.sim.events.options import EventOptions
from dfca.sim.events.world import (
    Churn,
    ComputeKind,
    Devices,
    LateJoiner,
    Link,
    Partition,
    World,
    check_clients,
    preset,
)
from dfca.sim.events.world import presets as world_presets

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Bandwidth = Annotated[float, Field(gt=0)] | Literal["unlimited"]
ClientNumber = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A table of the experiment file."""

    # Strict: `clients = "24"` and `rounds = true` are slips, not numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def given(self) -> dict[str, Any]:
        """Return the keys that are set."""
        return {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}


class DevicesConfig(Section):
    """A class of devices: this share of the clients takes `slowdown` times as long."""

    share: Fraction = Field(description="of the clients")
    slowdown: Positive = Field(description="times as long for every step")


class ComputeConfig(Section):
    """How long a client computes (`sim.events.world.Compute`).

    `slow_share` of the clients take `slowdown` times as long: one class of devices; `devices` lists several instead.
    """

    step_s: Positive | None = Field(None, description="seconds of one local step of an ordinary client")
    kind: ComputeKind | None = Field(None, description="how a round's time varies around that")
    spread: Seconds | None = Field(None, description="lognormal: standard deviation of its logarithm")
    tail: Positive | None = Field(None, description="pareto: shape; small is a heavy tail")
    slow_share: Fraction | None = Field(None, description="share of the clients that are slow")
    slowdown: Positive | None = Field(None, description="how many times as long they take")
    devices: tuple[DevicesConfig, ...] | None = Field(
        None, strict=False, description="several classes of devices, instead of slow_share and slowdown"
    )

    @model_validator(mode="after")
    def _check_devices(self) -> ComputeConfig:
        if self.devices is not None:
            if self.slow_share is not None or self.slowdown is not None:
                raise ConfigError(
                    "world.compute has slow_share or slowdown and devices, which both say who is slow; leave one out"
                )
            if (total := sum(each.share for each in self.devices)) > 1 + 1e-9:
                raise ConfigError(f"the shares of world.compute.devices must add up to at most 1, got {total:g}")
        return self

    def classes(self, below: tuple[Devices, ...]) -> tuple[Devices, ...]:
        """Resolve the classes of devices over those of the preset."""
        if self.devices is not None:
            return tuple(Devices(each.share, each.slowdown) for each in self.devices)
        if self.slow_share is None and self.slowdown is None:
            return below
        first = below[0] if below else Devices(SLOW_SHARE, 1.0)
        share = first.share if self.slow_share is None else self.slow_share
        return (Devices(share, first.slowdown if self.slowdown is None else float(self.slowdown)), *below[1:])


SLOW_SHARE = 0.1  # of the clients, where only a slowdown is given


class UplinkConfig(Section):
    """A client whose bandwidth is another."""

    client: ClientNumber = Field(description="its number")
    bandwidth_bytes_s: Bandwidth = Field(description="of its uplink")


class LinkConfig(Section):
    """How a message travels (`sim.events.world.Link`)."""

    latency_s: Seconds | None = Field(None, description="median time of a message, in seconds")
    spread: Seconds | None = Field(None, description="of its logarithm; above 0 messages overtake each other")
    bandwidth_bytes_s: Bandwidth | None = Field(
        None, description='of a client\'s uplink, which its messages share; or "unlimited"'
    )
    uplinks: tuple[UplinkConfig, ...] | None = Field(None, strict=False, description="clients with another bandwidth")


class FaultsConfig(Section):
    """The probabilities that a message is lost, arrives twice, or arrives broken."""

    loss: Fraction | None = Field(None, description="probability that a model is lost")
    duplication: Fraction | None = Field(None, description="... that it arrives twice")
    corruption: Fraction | None = Field(None, description="... that it arrives broken")


class ChurnConfig(Section):
    """Clients leave and return: `leaves_per_s` each, or so that the share `away` of them is away on average."""

    away: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="share of the clients away on average")
    leaves_per_s: Seconds | None = Field(None, description="how often a client leaves, instead of away")
    away_s: Positive | None = Field(None, description="mean length of an absence, in seconds")
    keeps: bool | None = Field(None, description="whether a client returns with its models")

    @model_validator(mode="after")
    def _check_rate(self) -> ChurnConfig:
        if self.away is not None and self.leaves_per_s is not None:
            raise ConfigError(
                "world.churn has away and leaves_per_s, which both say how often clients leave; leave one out"
            )
        return self

    def over(self, below: Churn) -> Churn:
        """Lay what is given over the preset's churn."""
        given = self.given()
        away = given.pop("away", None)
        churn = replace(below, **given)
        return churn if away is None else Churn.of_share(away, churn.away_s, churn.keeps)


class PartitionConfig(Section):
    """No message passes between groups from begin_s to end_s (never healed without it).

    Either `groups` of clients (those in none are one group), or `parts`: clients 0..N-1 cut into so many equal runs.
    """

    begin_s: Seconds = Field(description="when it begins")
    end_s: Positive | None = Field(None, description="when it heals; default: never")
    groups: tuple[Annotated[tuple[ClientNumber, ...], Field(strict=False)], ...] | None = Field(
        None, strict=False, description="lists of clients; those in none are one more group"
    )
    parts: int | None = Field(None, ge=2, description="so many equal runs of clients, instead of groups")

    @model_validator(mode="after")
    def _check_sides(self) -> PartitionConfig:
        if (self.groups is None) == (self.parts is None):
            raise ConfigError(
                "a partition needs groups, such as [[0, 1, 2]], or parts, such as 2; "
                f"got {'neither' if self.groups is None else 'both'}"
            )
        self.over(self.parts or 0)
        return self

    def over(self, clients: int) -> Partition:
        """Resolve for that many clients."""
        groups = self.groups
        if groups is None:
            bounds = [clients * part // (self.parts or 1) for part in range((self.parts or 1) + 1)]
            groups = tuple(tuple(range(low, high)) for low, high in pairwise(bounds))
        return Partition(self.begin_s, math.inf if self.end_s is None else self.end_s, groups)


class LateJoinerConfig(Section):
    """A client that is not there before at_s."""

    client: ClientNumber = Field(description="its number")
    at_s: Seconds = Field(description="when it comes")


class TimelineConfig(Section):
    """Which part of a run the report draws as lanes; `clients` None: those that something happens to."""

    begin_s: Seconds = Field(0.0, description="from when on")
    span_s: Positive | None = Field(None, description="for how long; default: the warm-up, if any, and some rounds")
    clients: tuple[ClientNumber, ...] | None = Field(
        None, strict=False, description="whose lanes; default: clients that something happens to"
    )
    lanes: int = Field(8, ge=2, le=40, description="how many lanes")


class WorldConfig(Section):
    """The world that the clients live in, in virtual time.

    `availability` is the path of a file that says who is there when (`sim.events.availability`); `trace` keeps every
    event.
    """

    preset: str = Field("ideal", description="what is not given is the preset's: `dfca list` shows them")
    trace: bool = Field(False, description="keep every event, for `dfca replay`")
    compute: ComputeConfig | None = None
    link: LinkConfig | None = None
    faults: FaultsConfig | None = None
    churn: ChurnConfig | None = None
    partitions: tuple[PartitionConfig, ...] | None = Field(None, strict=False, description="times without some links")
    late_joiners: tuple[LateJoinerConfig, ...] | None = Field(None, strict=False, description="clients that come later")
    availability: str | None = Field(None, description="path of a file with the times at which each client is there")
    timeline: TimelineConfig | None = None

    @model_validator(mode="after")
    def _check_preset(self) -> WorldConfig:
        preset(self.preset)
        return self

    def over(self, clients: int) -> World:
        """Resolve: the preset with everything given laid over it, for that many clients.

        Raises:
            ConfigError: where a table names a client that is not there, or the world is none to live in.
        """
        world = preset(self.preset)
        compute, link, faults = world.compute, world.link, world.faults
        if self.compute is not None:
            given = {k: v for k, v in self.compute.given().items() if k not in ("devices", "slow_share", "slowdown")}
            compute = replace(compute, **given, devices=self.compute.classes(compute.devices))
        if self.link is not None:
            link = _link_over(self.link, link)
        if self.faults is not None:
            faults = replace(faults, **self.faults.given())
        return replace(
            world,
            compute=compute,
            link=link,
            faults=faults,
            churn=world.churn if self.churn is None else self.churn.over(world.churn),
            partitions=tuple(each.over(clients) for each in self.partitions or ()),
            late_joiners=tuple(LateJoiner(each.client, each.at_s) for each in self.late_joiners or ()),
            absences=() if self.availability is None else read_availability(self.availability),
        )

    def facts(self, clients: int) -> dict[str, Any]:
        """Return every number of the resolved world as JSON knows it; an infinite one is null.

        The lines of an availability file, which can be thousands, are there as a checksum.
        """
        facts: dict[str, Any] = _finite(asdict(self.over(clients)))
        absences = facts.pop("absences")
        if absences:
            facts["absences_sha256"] = hashlib.sha256(json.dumps(absences).encode()).hexdigest()
        return facts


class StalenessConfig(Section):
    """How a message weighs by its age, and what the age is measured in (`peer.records.staleness`)."""

    kind: StalenessKind = Field("constant", description="constant: all models weigh alike, however old")
    power: float = Field(0.5, ge=0, description="polynomial, hinge: how fast the weight falls with the age")
    after: float = Field(4, ge=0, description="hinge: the age from which it falls")
    unit: StalenessUnit = Field("updates", description="what the age counts: the receiver's updates, rounds, seconds")

    def options(self) -> Staleness:
        """Translate into the record of the simulator."""
        return Staleness(self.kind, self.power, self.after, self.unit)


class ClockConfig(Section):
    """When a run in virtual time ends, waits and is evaluated.

    It ends after `until_s`, or when every client has done `rounds` rounds; a client that has done them stops.
    `timeout_s` bounds a wait of `batch` and of a server. `quorum`: the share of the clients that an election waits for.
    `target_accuracy`, in 0..1, or `target`, a value of another metric: tables show when it was reached.
    """

    until_s: Positive | None = Field(
        None, description="virtual seconds after which the run ends; default: after rounds"
    )
    timeout_s: Positive | None = Field(None, description="how long batch and a server wait; default: for ever")
    evaluate_every_s: Positive | None = Field(None, description="default: evaluation.every rounds on average")
    quorum: float = Field(0.8, gt=0, le=1, description="share of the clients in reach that an election waits for")
    target_accuracy: Fraction | None = Field(None, description="tables show when it was reached, 0 to 1")
    target: float | None = Field(
        None, description="the same for a task with another metric: a value of it, such as an RMSE"
    )
    staleness: StalenessConfig = Field(default_factory=lambda: StalenessConfig.model_validate({}))

    def event_options(self, rounds: int) -> EventOptions:
        """Translate into the options of the simulator."""
        return EventOptions(
            until_s=self.until_s,
            rounds=rounds,
            timeout_s=self.timeout_s,
            staleness=self.staleness.options(),
            evaluate_every_s=self.evaluate_every_s,
            quorum=self.quorum,
        )

    @classmethod
    def of(cls, given: ClockConfig | None) -> ClockConfig:
        """Fill in the defaults where there is no such table."""
        return given or cls.model_validate({})


def worlds() -> dict[str, dict[str, Any]]:
    """Return the facts of every preset of a world by its name."""
    return {name: WorldConfig.model_validate({"preset": name}).facts(1) for name in world_presets()}


def check_world(world: WorldConfig | None, clock: ClockConfig | None, clients: int) -> None:
    """Check both tables against the number of clients, before anything runs.

    Raises:
        ConfigError: for a clock without a world; a client that is not there; a churn that empties the network; a
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


def _link_over(given: LinkConfig, below: Link) -> Link:
    values = given.given()
    if "bandwidth_bytes_s" in values:
        values["bandwidth_bytes_s"] = _number(values["bandwidth_bytes_s"])
    if given.uplinks is not None:
        values["uplinks"] = tuple((each.client, _number(each.bandwidth_bytes_s)) for each in given.uplinks)
    return replace(below, **values)


def _number(bandwidth: float | str) -> float:
    return math.inf if bandwidth == "unlimited" else float(bandwidth)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
