"""Real availability from a file: both forms, both formats, and one sentence for each line that makes no sense."""

from __future__ import annotations

import math
from pathlib import Path

import networkx as nx
import pytest
from event_runs import run
from toy import make_toy_setting

from dfca.base.errors import ConfigError
from dfca.sim.events.availability import read_availability
from dfca.sim.events.world import Absence, Churn, LateJoiner, World

STAYS = (Absence(0, 0.0, 2.0), Absence(0, 5.0, 9.0), Absence(0, 12.0, math.inf), Absence(3, 4.0, math.inf))
FILES = {
    "stays.csv": "client,begin_s,end_s\n0,2,5\n3,0,4\n0,9,12\n",
    "stays.jsonl": '{"client": 0, "begin_s": 2, "end_s": 5}\n{"client": 3, "begin_s": 0, "end_s": 4}\n\n'
    '{"client": 0, "begin_s": 9, "end_s": 12}\n',
    "switches.csv": "client,time_s,online\n0,2,1\n0,5,0\n3,4,false\n0,9,true\n0,10,1\n0,12,0\n",
    "switches.jsonl": '{"client": 0, "time_s": 2, "online": true}\n{"client": 0, "time_s": 5.0, "online": 0}\n'
    '{"client": 3, "time_s": 4, "online": false}\n{"client": 0, "time_s": 9, "online": 1}\n'
    '{"client": 0, "time_s": 12, "online": false}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_all_forms_say_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert read_availability(tmp_path / name) == STAYS


def test_a_stay_without_an_end_lasts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("client,begin_s,end_s\n1,3,\n")
    assert read_availability(tmp_path / "a.csv") == (Absence(1, 0.0, 3.0),)


BAD = {
    "client,begin_s\n0,1\n": "a.csv, line 1 has client, begin_s; an availability trace has client, begin_s, end_s or "
    "client, time_s, online",
    "client,begin_s,end_s\n0,1\n": "a.csv, line 2 has 2 cells; the header has 3",
    "client,begin_s,end_s\n0,nan,2\n": "a.csv, line 2: begin_s must be >= 0 and finite, got 'nan'",
    "client,begin_s,end_s\n0,-1,2\n": "a.csv, line 2: begin_s must be >= 0 and finite, got '-1'",
    "client,begin_s,end_s\n0,3,2\n": "a.csv, line 2: a stay must end after it begins (3 s), got end_s 2",
    "client,begin_s,end_s\n0,1,5\n0,4,6\n": "a.csv, line 3: client 0 comes at 4 s, before its stay until 5 s is over; "
    "sort a client's lines by time and join those that overlap",
    "client,time_s,online\n0,4,1\n0,3,0\n": "a.csv, line 3: client 0 switches at 3 s, not after its switch at 4 s; "
    "sort a client's lines by time",
    "client,time_s,online\n0,4,maybe\n": "a.csv, line 2: online must be 1 or 0 (true or false), got 'maybe'",
    "client,time_s,online\nbob,4,1\n": "a.csv, line 2: client must be a number 0, 1, 2, ..., got 'bob'",
    "client,time_s,online\n1.5,4,1\n": "a.csv, line 2: client must be a number 0, 1, 2, ..., got '1.5'",
    '{"client": 0, "time_s": 1, "onl': "a.csv, line 1 is not JSON: ",
    '{"client": true, "time_s": 1, "online": 1}\n': "a.csv, line 1: client must be a number 0, 1, 2, ..., got True",
    '{"client": null, "time_s": 1, "online": 1}\n': "a.csv, line 1: client must be a number 0, 1, 2, ..., got None",
    '{"client": 0, "time_s": true, "online": 1}\n': "a.csv, line 1: time_s must be >= 0 and finite, got True",
    '{"client": 0, "begin_s": 1, "end_s": [2]}\n': "a.csv, line 1: end_s must be >= 0 and finite, got [2]",
    "client,time_s,online\n0,4,yes\n": "a.csv, line 2: online must be 1 or 0 (true or false), got 'yes'",
    "client,begin_s,end_s\n-1,1,2\n": "a.csv, line 2: client must be a number 0, 1, 2, ..., got '-1'",
    "client,begin_s,end_s\n0,1,inf\n": "a.csv, line 2: end_s must be >= 0 and finite, got 'inf'",
    "\n": "a.csv has no lines, so it says nothing about anybody; leave it out",
    "client,begin_s,end_s\n": "a.csv has no lines, so it says nothing about anybody; leave it out",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_availability(tmp_path / "a.csv")
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(BAD[text])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the availability trace"):
        read_availability(tmp_path / "none.csv")


WORLDS = [
    (World(absences=(Absence(9, 1.0, 2.0),)), "the availability trace names client 9; the clients are 0..2"),
    (
        World(absences=(Absence(1, 1.0, 4.0), Absence(1, 3.0, 5.0))),
        "client 1 is away twice at 3 s in the availability trace; join the absences that overlap",
    ),
    (
        World(absences=(Absence(1, 1.0, 4.0),), late_joiners=(LateJoiner(1, 2.0),)),
        "client 1 is a late joiner and in the availability trace, which both say when it is there; leave one out",
    ),
    (
        World(absences=(Absence(1, 1.0, 4.0),), churn=Churn(0.1)),
        "churn.leaves_per_s and an availability trace both say who is away when; set churn.leaves_per_s = 0",
    ),
    (
        World(absences=tuple(Absence(i, 0.0, 4.0) for i in range(3))),
        "none of the 3 clients is there at 0 s by the availability trace, so no client has models to begin with; shift "
        "its times",
    ),
]


@pytest.mark.parametrize(("world", "sentence"), WORLDS)
def test_worlds_that_cannot_be(world: World, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.check([1, 1, 1], 1000, None)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("keeps", [True, False])
def test_clients_are_away_when_the_file_says_so(keeps: bool) -> None:
    setting = make_toy_setting("dfca-gi", aggregation="sequential", graph=nx.complete_graph(6))
    absences = (Absence(0, 0.0, 4.5), Absence(3, 5.0, 9.0), Absence(4, 7.0, math.inf))
    world = World(churn=Churn(keeps=keeps), absences=absences)
    result = run(setting, world, until_s=16.0, evaluate_every_s=2.0, trace=True)
    changes = [(r.time, r.kind, r.client) for r in result.trace or [] if r.kind in ("absent", "leave", "return")]
    assert changes == [
        (0.0, "absent", 0),
        (4.5, "return", 0),
        (5.0, "leave", 3),
        (7.0, "leave", 4),
        (9.0, "return", 3),
    ]
    assert [row["away"] for row in result.metrics][:7] == [1, 1, 1, 2, 1, 1, 1]
    took = {record.client for record in result.trace or [] if record.kind == "take"}
    assert took == ({0} if keeps else {0, 3})
    assert next(row["time_s"] for row in result.metrics if 0 not in row["without_models"]) == 6.0
