"""`dfca node status --all`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from attack_world import attack
from rich.console import Console

from dfca.node.operate.members import MOST_TEXT, ask_all, overview_table, read_summary, summarise


def shown(answer: dict) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(overview_table(answer))
    return capture.get()


def test_all_members_are_asked_from_one_device(tmp_path: Path) -> None:
    """Two run; the third answers no probe."""

    async def run() -> dict:
        async with attack(tmp_path, honest=2) as swarm:
            swarm.honest[1]._problems["kept"] = "the disk is full; free some space"
            return await asyncio.get_running_loop().run_in_executor(None, ask_all, swarm.honest[0].folder.path)

    answer = asyncio.run(run())
    first, second, villain = answer["members"]
    assert [first["name"], second["name"], villain["name"]] == ["node0", "node1", "node2"]
    for member in (first, second):
        assert member["state"] in ("training", "waiting")
        assert member["round"] >= 2
        assert 0 <= member["accuracy"] <= 1
        assert member["linked"] == 1
    assert second["problems"] == ["the disk is full; free some space"]
    assert villain["state"] in ("no answer", "not asked: link down", "not asked: link dead")
    text = shown(answer)
    assert "node1: the disk is full; free some space" in text
    assert f"{second['accuracy']:.1%}" in text


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "9" * 5000])
def test_answers_of_members_may_be_malformed(text: str) -> None:
    assert read_summary(text) == {}


def test_answers_of_members_are_bounded_and_written_as_text() -> None:
    lie = {"round": "[red]7", "accuracy": "high", "state": ["x"], "problems": ["p" * 9999] * 99, "other": 1}
    said = read_summary(json.dumps(lie))
    assert len(said["problems"]) == 3
    assert max(map(len, said["problems"])) == MOST_TEXT
    assert "other" not in said
    assert "state" not in said
    text = shown({"members": [{"name": "garage", **said}]})
    assert "[red]7" in text
    assert "?" in text  # no number


def test_a_summary_is_short() -> None:
    status = {"neighbours": [{"state": "up"}] * 9, "problems": ["x" * 10_000] * 50, "round": 7, "secret": "s"}
    assert len(summarise(status)) < 2000
    assert read_summary(summarise(status))["linked"] == 9
    assert "secret" not in summarise(status)
