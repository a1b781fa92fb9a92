"""The public API: its names are pinned, the examples of all docstrings run, and type checkers understand it."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import dfca
import dfca.contracts
import dfca.testing
from dfca.api.arguments import SimulateOptions

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
USER_SCRIPT = ROOT / "tests" / "docs" / "typed_user.py"


def test_exported_members() -> None:
    """A name that goes or comes is a change for users: CHANGELOG.md says it."""
    names = """
        ALGORITHMS Algorithm Choice ClientData Comparison DataOptions DfcaError DfcaWarning LocalOptions Metrics Result
        Setting Simulation Split StoredRun Task TopologyOptions View __version__ cnn cnn1d load_run lowest make_graph
        make_split make_task mlp simulate split_from
    """
    assert sorted(dfca.__all__) == names.split()
    assert sorted(dir(dfca)) == names.split()
    assert dfca.contracts.__all__ == ["CONTRACTS", "ContractError", "check_algorithm", "make_setting"]
    assert dfca.testing.__all__ == ["lockstep", "make_clients", "stack"]


def modules_with_examples() -> list[str]:
    """Find the modules of the package whose docstrings have examples."""
    paths = [path for path in sorted((SOURCE / "dfca").rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str) -> None:
    with warnings.catch_warnings():
        module = importlib.import_module(name)
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


def test_the_package_is_marked_as_typed() -> None:
    """The wheel has every file of the package: none is excluded."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert (SOURCE / "dfca" / "py.typed").is_file()
    assert settings["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/dfca"]}
    assert settings["mypy"]["strict"]


@pytest.mark.slow  # 10 s; `make check` checks the same file
def test_a_type_checker_knows_what_simulate_returns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path), str(USER_SCRIPT)],
        env={"MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_script_of_a_user_is_checked_with_the_package() -> None:
    """`simulate` returns a Result or a Comparison, never Any: the script says so with `assert_type`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert USER_SCRIPT in [ROOT / path for path in settings["files"]]


def test_every_option_of_a_setting_is_known_to_editors() -> None:
    """`SimulateOptions` names the keywords of `simulate` and the fields of `Setting` that it passes on."""
    named = set(inspect.signature(dfca.simulate).parameters)
    made = {"split", "graph", "make_model", "local"}  # of the arguments
    passed_on = {field.name for field in dataclasses.fields(dfca.Setting)} - made
    assert set(SimulateOptions.__annotations__) | {"model", "data", "algorithm", "rounds", "seed", "options"} == (
        named | passed_on
    )
