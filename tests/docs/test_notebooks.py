"""The tutorial notebooks run from beginning to end, and conclude what their text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = {path.stem: path for path in sorted((DOCS / "notebooks").glob("*.ipynb"))}


@pytest.fixture
def run_notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    import notebooks

    return lambda name: notebooks.run(NOTEBOOKS[name])


def printed(notebook: dict[str, Any]) -> str:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "".join(line for cell in cells for output in cell["outputs"] for line in output.get("text", ()))


def test_a_csv_file_becomes_a_model_that_others_can_read(run_notebook: Any) -> None:
    notebook, names = run_notebook("csv-to-model")
    assert names["result"].assignments.tolist() in ([0, 1] * 10, [1, 0] * 10)
    assert names["result"].accuracy > names["alone"].accuracy
    assert printed(notebook).rstrip().endswith("says no"), "an upside-down home"


def test_algorithms_are_compared(run_notebook: Any) -> None:
    notebook, _ = run_notebook("compare-algorithms")
    assert "worse than dfca-auto: dfedavgm, local; within chance: dfca-gi, ifca, oracle" in printed(notebook)
    assert "[2, 2, 2, 2, 2]\ndfca-gi: models in use, by seed: [2, 2, 2, 2, 2]" in printed(notebook)


def test_an_algorithm_is_written_and_a_careless_one_is_found_out(run_notebook: Any) -> None:
    notebook, _ = run_notebook("write-an-algorithm")
    assert "careless breaks the contract 'same seed same bits'" in printed(notebook)


def test_a_swarm_runs_in_one_process(run_notebook: Any) -> None:
    notebook, names = run_notebook("swarm-on-a-laptop")
    assert names["done"].exit_code == 0, names["done"].output
    assert "node-05" in printed(notebook)


def test_every_notebook_has_a_test_and_stored_outputs() -> None:
    text = Path(__file__).read_text()
    for name, path in NOTEBOOKS.items():
        assert f'run_notebook("{name}")' in text
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert any(cell["outputs"] for cell in cells), "python docs/notebooks.py stores them"
        assert all(cell["execution_count"] for cell in cells)
