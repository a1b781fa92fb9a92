"""Models of the world: numbers by hand, draws by name, and one sentence for each value that makes no sense."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dfca.base.errors import ConfigError
from dfca.sim.events.world import (
    Churn,
    Compute,
    Devices,
    Faults,
    LateJoiner,
    Link,
    Partition,
    World,
    draw,
    preset,
    presets,
)


def test_draws_are_named_and_uniform() -> None:
    numbers = [draw(0, "loss", 1, 2, number) for number in range(2000)]
    assert numbers == [draw(0, "loss", 1, 2, number) for number in range(2000)]
    assert all(0 < u < 1 for u in numbers)
    assert sum(numbers) / 2000 == pytest.approx(0.5, abs=0.02)


def test_device_classes_are_dealt_exactly() -> None:
    compute = Compute(devices=(Devices(0.1, 10.0), Devices(0.25, 2.0)))
    factors = compute.slowdowns(seed=0, clients=40)
    assert (factors.count(10.0), factors.count(2.0), factors.count(1.0)) == (4, 10, 26)
    assert factors != compute.slowdowns(seed=1, clients=40)


def test_compute_noise() -> None:
    assert Compute().noise(0, 1, 2) == 1.0
    lognormal = sorted(Compute(kind="lognormal", spread=0.5).noise(0, 1, t) for t in range(1001))
    assert lognormal[500] == pytest.approx(1.0, abs=0.05)
    pareto = [Compute(kind="pareto", tail=2.0).noise(0, 1, t) for t in range(4000)]
    assert min(pareto) >= 1
    assert sum(p > 10 for p in pareto) / 4000 == pytest.approx(0.01, abs=0.005)  # P(noise > x) = x**-tail


def test_latency_and_uplinks() -> None:
    assert Link(0.2).latency(0, 1, 2, 3) == 0.2
    drawn = sorted(Link(0.2, spread=0.5).latency(0, 1, 2, number) for number in range(1001))
    assert drawn[500] == pytest.approx(0.2, abs=0.01)
    assert Link(uplinks=((1, 5.0),)).bandwidths(3) == [math.inf, 5.0, math.inf]


def test_churn_keeps_the_asked_share_away() -> None:
    churn = Churn.of_share(0.3, away_s=10.0)
    assert churn.share_away == pytest.approx(0.3)
    stays = sum(churn.stay(0, 1, n) for n in range(4000))
    absences = sum(churn.absence(0, 1, n) for n in range(4000))
    assert absences / (stays + absences) == pytest.approx(0.3, abs=0.02)


def test_partition_sides() -> None:
    assert Partition(0.0, 1.0, ((0, 1), (4,))).sides(6) == [1, 1, 0, 0, 2, 0]


def test_presets() -> None:
    assert set(presets()) == {"ideal", "datacentre", "wifi", "lora-like", "mobile"}
    assert preset("ideal") == World()
    for world in presets().values():
        world.check([2] * 6, 6_500_000, None)
    with pytest.raises(ConfigError, match='unknown world "wify"; did you mean "wifi"'):
        preset("wify")


def check(world: World, timeout_s: float | None = None) -> Callable[[], None]:
    return lambda: world.check([1, 1, 0], 1000, timeout_s)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Link(-0.1), "link.latency_s must be >= 0 and finite, got -0.1"),
    (lambda: Link(math.nan), "link.latency_s must be >= 0 and finite, got nan"),
    (lambda: Link(spread=-1.0), "link.spread must be >= 0 and finite, got -1.0"),
    (lambda: Link(bandwidth_bytes_s=-1.0), "link.bandwidth_bytes_s must be >= 0 (inf: no limit), got -1.0"),
    (lambda: Link(uplinks=((0, math.nan),)), "link.bandwidth_bytes_s must be >= 0 (inf: no limit), got nan"),
    (lambda: Compute(0.0), "compute.step_s must be > 0 and finite, got 0.0; without it time would stand still"),
    (lambda: Compute(math.nan), "compute.step_s must be > 0 and finite, got nan; without it time would stand still"),
    (lambda: Compute(kind="gamma"), 'unknown compute kind "gamma". Known: constant, lognormal, pareto'),  # type: ignore[arg-type]
    (lambda: Compute(spread=-1.0), "compute.spread must be >= 0 and finite, got -1.0"),
    (lambda: Compute(tail=0.0), "compute.tail must be > 0 and finite (2 is usual), got 0.0"),
    (
        lambda: Compute(devices=(Devices(0.7, 2.0), Devices(0.7, 3.0))),
        "the shares of compute.devices must add up to at most 1, got 1.4",
    ),
    (lambda: Devices(1.5, 2.0), "devices.share must be in 0..1, got 1.5"),
    (lambda: Devices(0.5, 0.0), "devices.slowdown must be > 0 and finite (1 is no slowdown), got 0.0"),
    (lambda: Faults(loss=1.1), "faults.loss must be in 0..1, got 1.1"),
    (lambda: Faults(corruption=math.nan), "faults.corruption must be in 0..1, got nan"),
    (lambda: Churn(-1.0), "churn.leaves_per_s must be >= 0 and finite, got -1.0"),
    (lambda: Churn(1.0, 0.0), "churn.away_s must be > 0 and finite, got 0.0"),
    (lambda: Churn.of_share(1.0), "the share of clients away must be in [0, 1), got 1.0"),
    (lambda: Partition(-1.0, 2.0, ()), "partition.begin_s must be >= 0 and finite, got -1.0"),
    (lambda: Partition(3.0, 2.0, ()), "a partition must end after it begins (3.0 s), got end_s 2.0"),
    (lambda: Partition(1.0, 2.0, ((0,), (0,))), "client 0 is in two groups of a partition; name it once"),
    (lambda: LateJoiner(0, math.inf), "late_joiner.at_s must be >= 0 and finite, got inf"),
    (
        check(World(link=Link(bandwidth_bytes_s=0.0))),
        "client 0 has 1 links and a bandwidth of 0, so nothing it sends arrives; give link.bandwidth_bytes_s > 0, "
        "or take its edges out of the graph",
    ),
    (check(World(partitions=(Partition(0.0, 1.0, ((7,),)),))), "partitions names client 7; the clients are 0..2"),
    (check(World(late_joiners=(LateJoiner(3, 1.0),))), "late_joiners names client 3; the clients are 0..2"),
    (check(World(link=Link(uplinks=((-1, 1.0),)))), "link.uplinks names client -1; the clients are 0..2"),
    (
        check(World(late_joiners=(LateJoiner(1, 1.0), LateJoiner(1, 2.0)))),
        "late_joiners names client 1 twice; a client joins once",
    ),
    (
        check(World(late_joiners=tuple(LateJoiner(i, 1.0) for i in range(3)))),
        "all 3 clients are late joiners, so no client has models to begin with; leave one out",
    ),
    (
        check(World(churn=Churn(1.0, 9.0))),
        "churn empties the network: with leaves_per_s 1 and away_s 9, 0.3 of 3 clients are there on average; "
        "it must be >= 1",
    ),
    (
        check(World(link=Link(0.5, bandwidth_bytes_s=2000.0)), timeout_s=0.9),
        "timeout_s must be finite and >= 1 s, what one model takes on the fastest link; got 0.9, and every wait would "
        "end before anything arrives",
    ),
    (
        check(World(), timeout_s=math.nan),
        "timeout_s must be finite and >= 0 s, what one model takes on the fastest link; got nan, and every wait would "
        "end before anything arrives",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_bad_input(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == sentence


def test_a_bandwidth_of_zero_where_nothing_is_sent_is_fine() -> None:
    World(link=Link(uplinks=((2, 0.0),))).check([1, 1, 0], 1000, None)
