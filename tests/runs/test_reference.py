"""`dfca options` and `dfca show`: every key is explained, and a preset is a file to start from."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dfca.algorithms import OPTIONS
from dfca.base.errors import ConfigError
from dfca.cli import app
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment, presets, read_stored
from dfca.experiment.reference import reference
from dfca.experiment.sweep import Sweep
from dfca.experiment.variants import flatten

runner = CliRunner()


def test_every_key_has_a_type_and_a_meaning() -> None:
    keys = reference()
    assert not [key.name for key in keys if not key.meaning or not key.kind or "typing" in key.kind]
    assert len({key.name for key in keys}) == len(keys) > 80
    braces = [key.name for key in keys if "{" in re.sub(r"`[^`]*`", "", key.meaning)]
    assert braces == [], "the site takes braces outside of code for attributes, and drops them"


def test_every_key_of_a_complete_config_is_explained() -> None:
    known = {key.name for key in reference()}
    config = load_experiment("stragglers").config
    named = {key for key in flatten(config.values()) if not key.startswith("algorithm.")}
    assert named <= known


def test_types_bounds_and_defaults_are_those_of_the_config() -> None:
    keys = {key.name: key for key in reference()}
    assert keys["clients"][1:3] == ("integer >= 1 and <= 1000000", "")
    assert keys["local.batch_size"][1:3] == ('"full" or integer >= 1', '"full"')
    assert keys["participation"][1:3] == ("number > 0 and <= 1", "1.0")
    assert keys["world.partitions[].parts"][1:3] == ("integer >= 2", "not set")
    default = Config.of({"clients": 2, "clusters": 1, "rounds": 1, "algorithms": ["local"]})
    assert keys["local.learning_rate"].default == str(default.local.learning_rate)


def test_the_options_of_algorithms_are_explained_by_their_functions() -> None:
    keys = {key.name: key for key in reference("algorithm")}
    assert keys["algorithm.deprl.head_steps"][1:3] == ("integer", "not set")
    assert keys["algorithm.facade.head"][1:3] == ("integer or text", "1")
    assert keys["algorithm.pens.peers"][1:3] == ('"any" or "neighbours"', '"any"')
    used = {name.rpartition(".")[2] for name in keys}
    assert used == set(OPTIONS), "an option without a meaning, or a meaning of none"


def test_a_prefix_narrows_the_list() -> None:
    assert {key.name.split(".")[0] for key in reference("local")} == {"local"}
    assert [key.name for key in reference("data.name")] == ["data.name"]
    with pytest.raises(ConfigError, match=r'^unknown key "lokal"; did you mean "clock" or "local"\?'):
        reference("lokal")
    with pytest.raises(ConfigError, match=r'^unknown key in \[local\] "momentun"; did you mean "momentum"\?'):
        reference("local.momentun")
    with pytest.raises(ConfigError, match=r'^unknown key "lokal"; did you mean'):
        reference("lokal.steps.first")


def test_options_and_show_on_the_command_line() -> None:
    shown = runner.invoke(app, ["options", "mixing"])
    assert shown.exit_code == 0
    assert "mixing.aggregation" in shown.output
    assert "local.steps" not in shown.output


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_shown_preset_is_the_same_experiment(name: str, tmp_path: object) -> None:
    shown = runner.invoke(app, ["show", name])
    assert shown.exit_code == 0
    path = tmp_path / "mine.toml"  # type: ignore[operator]
    path.write_text(shown.output)
    assert load_experiment(path).config.digest() == load_experiment(name).config.digest()


def test_show_complete_names_every_value() -> None:
    shown = runner.invoke(app, ["show", "quickstart", "--complete"])
    assert "weight_decay = 0.0" in shown.output


def test_the_page_of_keys_is_up_to_date_and_its_examples_are_valid() -> None:
    """docs/experiments.md is made by `make docs`."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "experiments.md").read_text()
    for key in reference():
        assert f"| `{key.name}` |" in page, f"{key.name} is not in docs/experiments.md; run `make docs`"
        assert key.meaning.replace("|", "\\|") in page
    first, twice, sweep = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(read_stored(twice)[0].algorithms) == 4
    assert len(Sweep.of(tomllib.loads(sweep)).expand(read_stored(first)[0])) == 8
