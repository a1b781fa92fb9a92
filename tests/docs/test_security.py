"""What docs/security.md promises of files: reading a run folder runs none of the code that it names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dfca
from dfca.cli import app
from dfca.experiment.load import load_experiment
from dfca.runs.runner import run

PARTS = """
import torch

def rooms(clients, seed):
    x = torch.randn(clients, 10, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x[..., 0] > 0).long()

def network(shape, classes):
    return torch.nn.Linear(shape[0], classes)

def ring(clients, seed):
    return [(i, (i + 1) % clients) for i in range(clients)]

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

def hits(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()

def mine():
    from dfca import Algorithm, Choice
    return Algorithm("mine", start="shared", exchange="gossip", choose=lambda view: Choice(int(view.losses.argmin())))
"""
EXPERIMENT = """
clients = 3
clusters = 1
rounds = 1
algorithms = ["strange_parts:mine"]
data.factory = "strange_parts:rooms"
model.factory = "strange_parts:network"
topology.name = "strange_parts:ring"
task = {name = "classification", loss = "strange_parts:loss", metric = "strange_parts:hits"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run whose every key names code of its own, and then make that code a trap."""
    path = tmp_path_factory.mktemp("strange")
    module = path / "strange_parts.py"
    module.write_text(PARTS)
    (path / "strange.toml").write_text(EXPERIMENT)
    run(load_experiment(path / "strange.toml"), path / "run", save_models=True)
    sys.modules.pop("strange_parts")
    module.write_text("raise BaseException('the code of a run folder was run')\n")
    return path / "run"


def _load(folder: Path) -> None:
    stored = dfca.load_run(folder)
    assert len(stored.metrics) == len(stored.results) == 1
    assert len(stored.assignments) == 3
    assert repr(stored)


def _command(*words: str) -> Callable[[Path], None]:
    def call(folder: Path) -> None:
        result = CliRunner().invoke(app, [*words, str(folder)], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    return call


READERS = {
    "load_run": _load,
    "report": _command("report", "--format", "markdown"),
    "watch": _command("watch", "--terminal"),
    "repair": _command("repair"),
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_a_run_folder_runs_no_code_that_it_names(folder: Path, reader: str) -> None:
    READERS[reader](folder)
    assert "strange_parts" not in sys.modules


def test_the_trap_works(folder: Path) -> None:
    """The page says that making a module again does run the code."""
    with pytest.raises(BaseException, match="was run"):
        dfca.load_run(folder).model(client=0)
