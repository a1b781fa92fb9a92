"""The tables [world] and [clock]: what they accept, what they stand for, and the sentence for everything else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dfca.base.errors import ConfigError
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment, presets, read_stored
from dfca.experiment.sweep import Sweep
from dfca.experiment.world import worlds
from dfca.report.wording import world_in_words
from dfca.sim.events.world import Churn, Devices, Partition, World, preset

SMALL = {"clients": 8, "clusters": 2, "rounds": 3, "algorithms": ["dfca-gi", "local"]}
IN_VIRTUAL_TIME = ("stragglers", "delays", "churn", "lossy", "partition", "late-joiner")


def config(world: dict[str, Any] | None = None, **values: Any) -> Config:
    return Config.of(SMALL | ({} if world is None else {"world": world}) | values)


def world(**values: Any) -> World:
    table = config(values).world
    assert table is not None
    return table.over(8)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"world": 3}, "world must be a table, got 3"),
        (
            {"world": {"preset": "wfi"}},
            'unknown world "wfi"; did you mean "wifi"? Known: datacentre, ideal, lora-like, mobile, wifi',
        ),
        ({"world": {"link": {"latency_s": -1}}}, "world.link.latency_s must be >= 0, got -1"),
        ({"world": {"link": {"latency_s": math.nan}}}, "world.link.latency_s must be a finite number, got NaN"),
        (
            {"world": {"link": {"bandwidth_bytes_s": 0}}},
            'world.link.bandwidth_bytes_s must be > 0 or "unlimited", got 0',
        ),
        ({"world": {"compute": {"slowdown": 0}}}, "world.compute.slowdown must be > 0, got 0"),
        (
            {"world": {"compute": {"kind": "gauss"}}},
            'world.compute.kind must be "constant", "lognormal" or "pareto", got "gauss"',
        ),
        ({"world": {"faults": {"loss": 1.2}}}, "world.faults.loss must be <= 1, got 1.2"),
        (
            {"world": {"compute": {"slowdon": 5}}},
            'unknown key in [world.compute] "slowdon"; did you mean "slowdown"? Known: background, devices, kind, '
            "slow_share, slowdown, spread, step_s, tail",
        ),
        (
            {"world": {"compute": {"slowdown": 2, "devices": [{"share": 0.2, "slowdown": 2}]}}},
            "world.compute has slow_share or slowdown and devices, which both say who is slow; leave one out",
        ),
        (
            {"world": {"compute": {"devices": [{"share": 0.7, "slowdown": 2}, {"share": 0.7, "slowdown": 3}]}}},
            "the shares of world.compute.devices must add up to at most 1, got 1.4",
        ),
        (
            {"world": {"churn": {"away": 0.2, "leaves_per_s": 1}}},
            "world.churn has away and leaves_per_s, which both say how often clients leave; leave one out",
        ),
        ({"world": {"churn": {"away": 1.0}}}, "world.churn.away must be < 1, got 1.0"),
        (
            {"world": {"churn": {"away": 0.95}}},
            "churn empties the network: with leaves_per_s 0.316667 and away_s 60, 0.4 of 8 clients are there on "
            "average; it must be >= 1",
        ),
        ({"world": {"late_joiners": [{"client": 9, "at_s": 1}]}}, "late_joiners names client 9; the clients are 0..7"),
        (
            {"world": {"late_joiners": [{"client": 1}]}},
            "world.late_joiners[0].at_s is missing; add it to the experiment file",
        ),
        ({"world": {"partitions": [{"begin_s": -1, "parts": 2}]}}, "world.partitions[0].begin_s must be >= 0, got -1"),
        (
            {"world": {"partitions": [{"begin_s": 1, "prts": 2}]}},
            'unknown key in [world.partitions[0]] "prts"; did you mean "parts"? Known: begin_s, end_s, groups, parts',
        ),
        (
            {"world": {"partitions": [{"begin_s": 1}]}},
            "a partition needs groups, such as [[0, 1, 2]], or parts, such as 2; got neither",
        ),
        (
            {"world": {"partitions": [{"begin_s": 1, "groups": [[0, 1], [1]]}]}},
            "client 1 is in two groups of a partition; name it once",
        ),
        ({"world": {"partitions": [{"begin_s": 1, "groups": [[88]]}]}}, "names client 88; the clients are 0..7"),
        ({"world": {"timeline": {"clients": [88]}}}, "world.timeline.clients names client 88; the clients are 0..7"),
        (
            {"world": {"link": {"latency_s": 5}}, "clock": {"timeout_s": 1}},
            "timeout_s must be finite and >= 5 s, what one model takes on the fastest link; got 1, and every wait "
            "would end before anything arrives",
        ),
        ({"world": {}, "clock": {"until_s": 0}}, "clock.until_s must be > 0, got 0"),
        ({"world": {}, "clock": {"target_accuracy": 95}}, "clock.target_accuracy must be <= 1, got 95"),
        (
            {"clock": {"until_s": 3}},
            "[clock] needs a [world], which makes a run happen in virtual time; add [world] with preset = "
            '"ideal", or leave [clock] out',
        ),
        ({"world": {"latency_s": 5}}, '"latency_s" belongs in [world.link]'),
        ({"until_s": 5}, '"until_s" belongs in [clock]'),
    ],
)
def test_every_problem_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of(SMALL | values)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_given_is_the_presets() -> None:
    assert world() == World()
    assert world(preset="mobile") == preset("mobile")
    wifi, mine = preset("wifi"), world(preset="wifi", compute={"slowdown": 20}, link={"latency_s": 1})
    assert mine.compute.devices == (Devices(wifi.compute.devices[0].share, 20.0),)
    assert mine.compute.step_s == wifi.compute.step_s
    assert (mine.link.latency_s, mine.link.bandwidth_bytes_s) == (1, wifi.link.bandwidth_bytes_s)
    assert mine.faults == wifi.faults


def test_short_forms() -> None:
    assert world(compute={"slowdown": 5}).compute.devices == (Devices(0.1, 5.0),)
    assert world(churn={"away": 0.5, "away_s": 10}).churn == Churn.of_share(0.5, 10)
    assert world(preset="wifi", link={"bandwidth_bytes_s": "unlimited"}).link.bandwidth_bytes_s == math.inf
    assert world(partitions=[{"begin_s": 1, "parts": 2}]).partitions == (
        Partition(1, math.inf, ((0, 1, 2, 3), (4, 5, 6, 7))),
    )


def test_a_config_with_a_world_survives_its_file() -> None:
    given = config(
        {
            "preset": "wifi",
            "trace": True,
            "compute": {"devices": [{"share": 0.5, "slowdown": 2.0}]},
            "link": {"uplinks": [{"client": 3, "bandwidth_bytes_s": "unlimited"}]},
            "partitions": [{"begin_s": 1, "end_s": 2, "groups": [[0, 1], [2]]}],
            "late_joiners": [{"client": 1, "at_s": 3}],
        },
        clock={"until_s": 9, "staleness": {"kind": "hinge"}},
    )
    assert read_stored(given.to_toml())[0] == given


def test_the_digest_knows_what_a_preset_stands_for() -> None:
    plain, wifi = config({}), config({"preset": "wifi"})
    assert len({config().digest(), plain.digest(), wifi.digest()}) == 3
    spelled = {"latency_s": 0.005, "spread": 0.5, "bandwidth_bytes_s": 5e6}
    assert config({"preset": "wifi", "link": spelled}).digest() == wifi.digest()
    assert config({"trace": True, "timeline": {"lanes": 3}}).digest() == plain.digest()
    assert config({}, clock={"until_s": 3}).digest() != plain.digest()


def test_a_config_without_a_world_has_the_digest_that_it_always_had() -> None:
    values = config().values()
    assert "world" not in values
    assert "clock" not in values


def test_a_sweep_over_worlds() -> None:
    sweep = Sweep.of({"grid": {"world": {"preset": ["wifi", "mobile"], "compute": {"slowdown": [1, 10]}}}})
    points = sweep.expand(sweep.base(SMALL))
    resolved = [point.config.world.over(8) for point in points if point.config.world]
    assert [(point.link.latency_s, point.compute.devices[0].slowdown) for point in resolved] == [
        (0.005, 1),
        (0.005, 10),
        (0.05, 1),
        (0.05, 10),
    ]
    assert points[0].facts()["world"]["link"]["latency_s"] == 0.005


@pytest.mark.parametrize("name", IN_VIRTUAL_TIME)
def test_presets_in_virtual_time(name: str) -> None:
    experiment = load_experiment(name)
    assert presets()[name]
    assert all(point.config.world and point.config.clock for point in experiment.points)
    assert all(point.config.clock.target_accuracy for point in experiment.points if point.config.clock)


def test_availability_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "who.csv"
    file.write_text("client,begin_s,end_s\n3,0,10\n3,20,30\n")
    given = config({"availability": str(file)})
    assert given.world is not None
    assert [(absence.client, absence.begin_s, absence.end_s) for absence in given.world.over(8).absences] == [
        (3, 10, 20),
        (3, 30, math.inf),
    ]
    before = given.digest()
    file.write_text("client,begin_s,end_s\n3,0,11\n3,20,30\n")
    assert given.digest() != before  # what the file says counts, not its name
    file.write_text("client,begin_s,end_s\n33,0,10\n")
    with pytest.raises(ConfigError, match=r"the availability trace names client 33; the clients are 0\.\.7"):
        config({"availability": str(file)})
    with pytest.raises(ConfigError, match=r"cannot read the availability trace .*missing\.csv"):
        config({"availability": str(tmp_path / "missing.csv")})


def test_worlds_in_words() -> None:
    assert world_in_words(worlds()["ideal"]) == "1 s per local step (constant), no latency"
    words = world_in_words(
        config(
            {
                "compute": {"slowdown": 10},
                "link": {"latency_s": 0.05, "bandwidth_bytes_s": 5e6},
                "faults": {"loss": 0.1},
                "churn": {"away": 0.3, "away_s": 10, "keeps": False},
                "partitions": [{"begin_s": 5, "parts": 2}],
                "late_joiners": [{"client": 0, "at_s": 3}],
            }
        ).virtual_facts()["world"]
    )
    assert words == (
        "1 s per local step (constant), 10 % of the clients 10 times slower, latency 0.05 s, 5 MB/s up, 10 % loss, "
        "30 % away (10 s at a time, back without models), apart from 5 s to the end, 1 late joiner"
    )
