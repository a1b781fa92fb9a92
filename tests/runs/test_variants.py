"""Algorithms with options of their own: the same one twice in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dfca.base.errors import ConfigError
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment, read_stored
from dfca.runs.runner import run
from dfca.runs.store.reading import load_run

BASE: dict[str, Any] = {
    "clients": 6,
    "clusters": 2,
    "rounds": 2,
    "seeds": 2,
    "data": {"name": "digits", "samples_per_client": 20},
    "model": {"name": "mlp", "hidden": 4},
}
TOML = """
clients = 6
clusters = 2
rounds = 2
seeds = 2
algorithms = [
    "fedavg",
    {name = "fedavg", label = "fedavg, momentum 0.9", local.momentum = 0.9},
    {name = "dfedavgm", momentum = 0.0},
    {name = "fedavg", label = "fedavg, no momentum", local.momentum = 0.0},
]
data = {name = "digits", samples_per_client = 20}
model = {name = "mlp", hidden = 4}
local = {learning_rate = 0.2}
"""


def config(*algorithms: Any, **more: Any) -> Config:
    return Config.of({**BASE, "algorithms": list(algorithms), **more})


def test_a_table_is_short_for_a_label_and_its_options() -> None:
    short = config("dfca-auto", {"name": "dfedavgm", "momentum": 0.5})
    long = config("dfca-auto", "dfedavgm momentum=0.5", algorithm={"dfedavgm momentum=0.5": {"momentum": 0.5}})
    assert short == long
    assert short.algorithms == ("dfca-auto", "dfedavgm momentum=0.5")
    assert read_stored(short.to_toml())[0] == short
    named = config({"name": "dfedavgm", "momentum": 0.5, "label": "dfedavgm, less"})
    assert named.algorithm == {"dfedavgm, less": {"momentum": 0.5}}
    assert config({"name": "dfca-auto"}) == config("dfca-auto")


def test_a_row_may_have_sections_of_its_own() -> None:
    parsed = config("fedavg", {"name": "fedavg", "label": "fedavg + momentum", "local": {"momentum": 0.9}})
    assert parsed.of_row("fedavg") is parsed
    own = parsed.of_row("fedavg + momentum")
    assert (own.local.momentum, own.local.steps) == (0.9, parsed.local.steps)
    assert own.data == parsed.data


def test_rows_have_options_of_their_own_in_virtual_time_too() -> None:
    row = {"name": "dfca-auto", "merge": False, "label": "dfca-auto, by verdict"}
    assert config(row, world={}).algorithms == ("dfca-auto, by verdict",)
    with pytest.raises(ConfigError, match="pens chooses its peers"):
        config({"name": "pens", "momentum": 0.5}, world={})


@pytest.mark.parametrize(
    ("algorithms", "sentence"),
    [
        ([{"momentum": 0.9}], "a table in algorithms needs a name"),
        ([{"name": "fedavgg"}], 'unknown algorithm "fedavgg"'),
        ([{"name": "fedavg", "label": "mine", "local": {}}], "must begin with the name of its algorithm"),
        ([{"name": "fedavg", "label": "fedavg, /../x", "local": {}}], "it names files"),
        ([{"name": "fedavg", "label": "fedavg " + 60 * "x", "local": {}}], "at most 60 letters"),
        ([{"name": "dfedavgm", "speed": 3}], 'unknown option of dfedavgm "speed"'),
        ([{"name": "fedavg", "local": {"momentum": 2.0}}], "local.momentum must be >= 0 and < 1, got 2.0"),
        ([{"name": "fedavg", "local": {"rate": 2.0}}], "unknown key"),
        ([{"name": "fedavg", "data": {"name": "mnist"}}], 'unknown option of fedavg "data"'),
        (["fedavg fast"], 'needs options of its own: give [algorithm."fedavg fast"]'),
        ([{"name": "dfedavgm", "momentum": 0.5}, {"name": "dfedavgm", "momentum": 0.5}], "must not repeat a value"),
    ],
)
def test_mistakes_are_told_in_a_sentence(algorithms: list[Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*algorithms)
    assert sentence in str(error.value)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variants") / "rows.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


def test_the_command_line_chooses_rows_by_their_labels(file: Path) -> None:
    chosen = load_experiment(file, algorithms=["fedavg", "momentum 0.9", "dfedavgm momentum=0.0"])
    assert chosen.config.algorithms == ("fedavg, momentum 0.9", "dfedavgm momentum=0.0")
    assert chosen.config.digest() == load_experiment(file).config.digest(), "the same trials as of the whole"


def test_rows_are_run_with_their_own_options(file: Path) -> None:
    folder = file.parent / "run"
    run(load_experiment(file), folder)
    rows = {(row.algorithm, row.seed): row for row in load_run(folder).trials}
    assert len(rows) == 8
    for seed in (0, 1):
        plain, same = rows["fedavg", seed], rows["fedavg, no momentum", seed]
        assert same["train_loss"] == plain["train_loss"], "the same options, data and graph: the same bits"
        assert rows["fedavg, momentum 0.9", seed]["train_loss"] != plain["train_loss"]
        assert [rows[name, seed]["momentum"] for name in ("fedavg", "fedavg, momentum 0.9")] == [0.0, 0.9]
        assert rows["dfedavgm momentum=0.0", seed]["momentum"] == 0.0
        assert plain["diverged_clients"] == 0
