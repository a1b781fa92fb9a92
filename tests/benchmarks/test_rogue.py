"""The rogue members of `python -m benchmarks rogue`."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.rogue import ATTACKS, Attacked, Phase, attack, print_table
from dfca.base.errors import ConfigError

BY_HAND = {"nothing", "by-elections", "by-elections-of-others", "alarms", "false-results", "false-answers"}
"""Calls for elections may hold up training for as long as the protocol says; false surveys cost accuracy."""


def test_an_unknown_attack_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match='unknown attack "alarm"'):
        print_table(["alarm"], 1.0, 1, "clip", print)


def test_a_row_says_what_is_kept() -> None:
    row = Attacked("flood", (Phase(2.0, 1.0), Phase(1.5, 0.55), Phase(2.0, 0.7)), 1234.0).row()
    assert row == "| flood | 2.00, 1.50, 2.00 | 75% | 100%, 55%, 70% | 1.2 |"
    assert Attacked("flood", (Phase(0.0, 1.0),) * 3, 0.0).row().startswith("| flood | 0.00, 0.00, 0.00 | 0% |")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - BY_HAND))
def test_an_attack_costs_neither_rounds_nor_accuracy(name: str) -> None:
    before, during, after = asyncio.run(attack(name, 6.0)).phases
    assert during.rate > 0.5 * before.rate  # 0.9 on a machine with nothing else to do
    assert min(during.accuracy, after.accuracy) > before.accuracy - 0.05
