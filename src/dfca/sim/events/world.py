"""Models of the world that clients live in: how long they compute, how messages travel, who is away when.

Everything is a small frozen record. Every draw has a name (`draw(seed, "latency", sender, receiver, number)`), so a
world is a pure function of the seed, whatever the order in which it is asked. `presets` has ready worlds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, ClassVar, Literal

from dfca.base.errors import ConfigError, unknown
from dfca.base.table import Table, option
from dfca.core.rng import derive

SERVER = -1
"""The id of the server, where an algorithm has one."""
FLOAT_BYTES = 4
"""Models travel as 32-bit floats, whatever a simulation computes in."""

_NORMAL = NormalDist()


def draw(seed: int, *names: str | int) -> float:
    """Draw the number in (0, 1) of that name."""
    return (derive(seed, *names) + 0.5) / 2**32


def seconds(default: float, **about: Any) -> Any:
    """Declare a time or a spread, >= 0 and finite, of a table."""
    return option(default=default, ge=0, allow_inf_nan=False, **about)


def probability(default: float, **about: Any) -> Any:
    """Declare a probability of a table."""
    return option(default=default, ge=0, le=1, **about)


class Devices(Table):
    """A class of slow (or fast) devices: this share of the clients takes `slowdown` times as long for everything."""

    called: ClassVar[str] = "devices.{}"

    share: float = option(ge=0, le=1, description="of the clients")
    slowdown: float = option(
        gt=0,
        allow_inf_nan=False,
        demand="> 0 and finite (1 is no slowdown)",
        description="times as long for every step",
    )


class Compute(Table):
    """How long a client computes: a round of s local steps takes step_s * max(s, 1) * slowdown * noise seconds.

    noise, drawn anew for each round: "constant" 1; "lognormal" exp(spread z), median 1; "pareto" u**(-1/tail), at least
    1, with rare long ones: the smaller `tail`, the longer. Classes of devices are dealt exactly, by lot. background:
    the share of a client's compute that work beside its rounds has while they train; 0: it takes no time at all.
    """

    called: ClassVar[str] = "compute.{}"

    step_s: float = option(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        advice="without it time would stand still",
        description="seconds of one local step of an ordinary client",
    )
    kind: Literal["constant", "lognormal", "pareto"] = option(
        default="constant", called="compute kind", description="how a round's time varies around that"
    )
    spread: float = seconds(0.5, description="lognormal: standard deviation of its logarithm")
    tail: float = option(
        default=2.0,
        gt=0,
        allow_inf_nan=False,
        demand="> 0 and finite (2 is usual)",
        description="pareto: shape; small is a heavy tail",
    )
    devices: tuple[Devices, ...] = option(
        default=(), strict=False, description="several classes of devices, instead of slow_share and slowdown"
    )
    background: float = option(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the compute that work beside a round has while it trains; 0: takes no time",
        since=3,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (total := sum(devices.share for devices in self.devices)) > 1 + 1e-9:
            raise ConfigError(f"the shares of compute.devices must add up to at most 1, got {total:g}")

    def slowdowns(self, seed: int, clients: int) -> list[float]:
        """Deal the classes of devices out: (N,) factors."""
        order = sorted(range(clients), key=lambda i: (draw(seed, "device", i), i))
        factors, begin = [1.0] * clients, 0.0
        for devices in self.devices:
            for i in order[round(begin * clients) : round((begin + devices.share) * clients)]:
                factors[i] = devices.slowdown
            begin += devices.share
        return factors

    def noise(self, seed: int, client: int, round: int) -> float:
        """Draw how much longer than usual this round takes."""
        if self.kind == "constant":
            return 1.0
        u = draw(seed, "compute", client, round)
        return math.exp(self.spread * _NORMAL.inv_cdf(u)) if self.kind == "lognormal" else u ** (-1 / self.tail)


class Link(Table):
    """How a message travels: after B / bandwidth seconds on the sender's uplink, `latency_s` on the way.

    The messages of one sender share its uplink: they leave one after the other. spread 0 is a constant latency, above
    it is lognormal with the median latency_s, so that messages overtake each other. uplinks: (client, bytes per second)
    of clients whose bandwidth is another.
    """

    called: ClassVar[str] = "link.{}"

    latency_s: float = seconds(0.0, description="median time of a message, in seconds")
    spread: float = seconds(0.0, description="of its logarithm; above 0 messages overtake each other")
    bandwidth_bytes_s: float = math.inf
    uplinks: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in (self.bandwidth_bytes_s, *(bandwidth for _, bandwidth in self.uplinks)):
            if not value >= 0:
                raise ConfigError(f"link.bandwidth_bytes_s must be >= 0 (inf: no limit), got {value}")

    def bandwidths(self, clients: int) -> list[float]:
        """Return every client's uplink, in bytes per second: (N,)."""
        given = dict(self.uplinks)
        return [given.get(i, self.bandwidth_bytes_s) for i in range(clients)]

    @property
    def retry_s(self) -> float:
        """How long a sender waits for an acknowledgement before it repeats: two ways, each slower than 97 in 100."""
        return 2 * self.latency_s * math.exp(2 * self.spread)

    def latency(self, seed: int, sender: int, receiver: int, number: int) -> float:
        """Draw how long the sender's message of that number is on its way."""
        if not self.spread:
            return self.latency_s
        return self.latency_s * math.exp(self.spread * _NORMAL.inv_cdf(draw(seed, "latency", sender, receiver, number)))


class Faults(Table):
    """The probabilities that a message is lost, arrives twice, or arrives with a payload that is broken."""

    called: ClassVar[str] = "faults.{}"

    loss: float = probability(0.0, description="probability that a model is lost")
    duplication: float = probability(0.0, description="... that it arrives twice")
    corruption: float = probability(0.0, description="... that it arrives broken")


class Churn(Table):
    """Clients leave and return, each as a Poisson process: `leaves_per_s` while here, back after `away_s` on average.

    A client that does not keep its models returns empty and takes its neighbours'.
    """

    called: ClassVar[str] = "churn.{}"

    leaves_per_s: float = seconds(0.0, description="how often a client leaves, instead of away")
    away_s: float = option(default=60.0, gt=0, allow_inf_nan=False, description="mean length of an absence, in seconds")
    keeps: bool = option(default=True, description="whether a client returns with its models")

    @staticmethod
    def of_share(away: float, away_s: float = 60.0, keeps: bool = True) -> Churn:
        """Make the churn under which that share of the clients is away on average."""
        if not 0 <= away < 1:
            raise ConfigError(f"the share of clients away must be in [0, 1), got {away}")
        return Churn(away / (1 - away) / away_s, away_s, keeps)

    @property
    def share_away(self) -> float:
        """The share of time that a client is away."""
        return self.leaves_per_s * self.away_s / (1 + self.leaves_per_s * self.away_s)

    def stay(self, seed: int, client: int, number: int) -> float:
        """Draw how long the client's stay of that number is."""
        return -math.log(draw(seed, "stay", client, number)) / self.leaves_per_s

    def absence(self, seed: int, client: int, number: int) -> float:
        """Draw how long the client's absence of that number is."""
        return -math.log(draw(seed, "absence", client, number)) * self.away_s


class Partition(Table):
    """No message passes between two groups from begin_s to end_s. Clients in no group are one group together.

    A server is on the side of the largest group (of the first of several): the others cannot reach it.
    """

    called: ClassVar[str] = "partition.{}"

    begin_s: float = option(ge=0, allow_inf_nan=False, description="when it begins")
    end_s: float
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin_s < self.end_s:
            raise ConfigError(f"a partition must end after it begins ({self.begin_s} s), got end_s {self.end_s}")
        named = [client for group in self.groups for client in group]
        if twice := sorted({client for client in named if named.count(client) > 1}):
            raise ConfigError(f"client {twice[0]} is in two groups of a partition; name it once")

    def sides(self, clients: int) -> list[int]:
        """Return the group of every client: (N,)."""
        side = {client: number + 1 for number, group in enumerate(self.groups) for client in group}
        return [side.get(i, 0) for i in range(clients)]

    def server_side(self, clients: int) -> int:
        """Return the group that keeps the server: the largest; of equals, the one with the lowest client."""
        sides = self.sides(clients)
        return max(sides, key=lambda side: (sides.count(side), -sides.index(side)))


class Absence(Table):
    """A client is away from begin_s to end_s (inf: for good), as `sim.events.availability` reads it from a file.

    What it does with its bank is the churn's `keeps`.
    """

    called: ClassVar[str] = "absence.{}"

    client: int
    begin_s: float = option(ge=0, allow_inf_nan=False)
    end_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin_s < self.end_s:
            raise ConfigError(f"an absence must end after it begins ({self.begin_s} s), got end_s {self.end_s}")


class LateJoiner(Table):
    """A client that is not there before at_s; it begins with the models of its neighbours."""

    called: ClassVar[str] = "late_joiner.{}"

    client: int = option(ge=0, description="its number")
    at_s: float = option(ge=0, allow_inf_nan=False, description="when it comes")


class World(Table):
    """All of it. The default is ideal: equal speeds, no delays, no faults; then time is a round counter."""

    compute: Compute = Compute()
    link: Link = Link()
    faults: Faults = Faults()
    churn: Churn = Churn()
    partitions: tuple[Partition, ...] = ()
    late_joiners: tuple[LateJoiner, ...] = ()
    absences: tuple[Absence, ...] = ()

    def check(self, degrees: Sequence[int], model_bytes: int, timeout_s: float | None) -> None:
        """Raise ConfigError where these clients cannot run in this world: degrees (N,), one per client."""
        clients = len(degrees)
        joiners = [joiner.client for joiner in self.late_joiners]
        named = {
            "link.uplinks": [client for client, _ in self.link.uplinks],
            "partitions": [client for partition in self.partitions for group in partition.groups for client in group],
            "late_joiners": joiners,
            "the availability trace": [absence.client for absence in self.absences],
        }
        for what, ids in named.items():
            check_clients(what, ids, clients)
        if twice := sorted({client for client in joiners if joiners.count(client) > 1}):
            raise ConfigError(f"late_joiners names client {twice[0]} twice; a client joins once")
        if len(joiners) == clients:
            raise ConfigError(
                f"all {clients} clients are late joiners, so no client has models to begin with; leave one out"
            )
        self._check_absences(joiners, clients)
        bandwidths = self.link.bandwidths(clients)
        if closed := [i for i in range(clients) if degrees[i] and bandwidths[i] == 0]:
            raise ConfigError(
                f"client {closed[0]} has {degrees[closed[0]]} links and a bandwidth of 0, so nothing it sends arrives; "
                "give link.bandwidth_bytes_s > 0, or take its edges out of the graph"
            )
        present = clients * (1 - self.churn.share_away)
        if self.churn.leaves_per_s and present < 1:
            raise ConfigError(
                f"churn empties the network: with leaves_per_s {self.churn.leaves_per_s:g} and away_s "
                f"{self.churn.away_s:g}, {present:.2g} of {clients} clients are there on average; it must be >= 1"
            )
        fastest = max((bandwidths[i] for i in range(clients) if degrees[i]), default=math.inf)
        needed = self.link.latency_s + model_bytes / fastest
        if timeout_s is not None and (not math.isfinite(timeout_s) or timeout_s < needed):
            raise ConfigError(
                f"timeout_s must be finite and >= {needed:g} s, what one model takes on the fastest link; got "
                f"{timeout_s:g}, and every wait would end before anything arrives"
            )

    def _check_absences(self, joiners: Sequence[int], clients: int) -> None:
        """Raise ConfigError where absences overlap, say something else than other parts, or leave nobody."""
        latest: dict[int, float] = {}
        for absence in sorted(self.absences, key=lambda one: (one.client, one.begin_s)):
            if absence.begin_s < latest.get(absence.client, 0.0):
                raise ConfigError(
                    f"client {absence.client} is away twice at {absence.begin_s:g} s in the availability trace; join "
                    "the absences that overlap"
                )
            latest[absence.client] = absence.end_s
        if both := sorted(set(latest) & set(joiners)):
            raise ConfigError(
                f"client {both[0]} is a late joiner and in the availability trace, which both say when it is there; "
                "leave one out"
            )
        if self.absences and self.churn.leaves_per_s:
            raise ConfigError(
                "churn.leaves_per_s and an availability trace both say who is away when; set churn.leaves_per_s = 0"
            )
        late = {absence.client for absence in self.absences if absence.begin_s == 0} | set(joiners)
        if self.absences and len(late) == clients:
            raise ConfigError(
                f"none of the {clients} clients is there at 0 s by the availability trace, so no client has models to "
                "begin with; shift its times"
            )


def presets() -> Mapping[str, World]:
    """Ready worlds by name; the numbers are orders of magnitude, not measurements.

    ideal        equal speeds, no delays, no faults
    datacentre   10 ms per local step, 0.5 ms and 10 Gbit/s between machines, next to no noise
    wifi         100 ms per step, a tenth of the devices 3 times slower; 5 ms, 40 Mbit/s up, 1 % loss
    lora-like    a second per step, 1 s and 5 kbit/s up, 10 % loss: a model of 0.6 MB takes 17 minutes to leave
    mobile       200 ms per step with Pareto stragglers, a fifth of the phones 4 times slower; 50 ms with much jitter,
                 10 Mbit/s up, 2 % loss; a phone leaves every 10 minutes for 2 (17 % are away)
    """
    slow = Devices(share=0.1, slowdown=3.0)
    return {
        "ideal": World(),
        "datacentre": World(Compute(0.01, "lognormal", spread=0.1), Link(0.0005, spread=0.2, bandwidth_bytes_s=1.25e9)),
        "wifi": World(
            Compute(0.1, "lognormal", spread=0.3, devices=(slow,)),
            Link(0.005, spread=0.5, bandwidth_bytes_s=5e6),
            Faults(loss=0.01),
        ),
        "lora-like": World(
            Compute(1.0, "lognormal", spread=0.2), Link(1.0, spread=0.3, bandwidth_bytes_s=625.0), Faults(loss=0.1)
        ),
        "mobile": World(
            Compute(0.2, "pareto", tail=2.0, devices=(Devices(share=0.2, slowdown=4.0),)),
            Link(0.05, spread=0.7, bandwidth_bytes_s=1.25e6),
            Faults(loss=0.02, duplication=0.005),
            Churn(leaves_per_s=1 / 600, away_s=120.0),
        ),
    }


def preset(name: str) -> World:
    """Make a ready world by name. Raises ConfigError on an unknown one, with the known ones."""
    known = presets()
    if name not in known:
        raise unknown("world", name, known)
    return known[name]


def check_clients(what: str, ids: Iterable[int], clients: int) -> None:
    """Raise ConfigError where an id is not one of the clients 0..N-1."""
    for client in ids:
        if not 0 <= client < clients:
            raise ConfigError(f"{what} names client {client}; the clients are 0..{clients - 1}")
