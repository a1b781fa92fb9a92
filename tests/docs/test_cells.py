"""The simulation of cells behind docs/scale.md, in small."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def measure_cells(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    return importlib.import_module("measure_cells")


def test_what_delegates_decide_reaches_every_device_of_every_cell(
    measure_cells: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROUNDS": 4, "UPPER_ROUNDS": 3, "QUIET": 2, "MORE_ROUNDS": 3}.items():
        monkeypatch.setattr(measure_cells, name, value)
    rows = measure_cells.simulate(4, 8)
    (_, first), (_, (elected,)), (_, second), (_, (averaged,)), (_, third), _ = rows
    for swarms, upper in ((second, elected), (third, averaged)):
        for c, (cell, delegate) in enumerate(zip(swarms, upper.peers, strict=True)):
            entry = measure_cells.of_upper_swarm(delegate.open_models, 4)
            assert {peer.lineage for peer in cell.peers} == {cell.peers[0].lineage}
            assert any(one.digest == entry.digest for one in cell.peers[0].lineage)
            assert len(cell.peers[0].lineage) > len(first[c].peers[0].lineage)
    assert measure_cells.table(rows).count("\n") == 1 + len(rows)
