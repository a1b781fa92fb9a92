"""The public API: its names are pinned, the examples of all docstrings run, and type checkers understand it."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import dfca
import dfca.contracts
import dfca.testing
from dfca.api.arguments import SimulateOptions
from dfca.core.method import StepTable
from dfca.report.paper.citation import bibtex

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
USER_SCRIPT = ROOT / "tests" / "docs" / "typed_user.py"


def test_exported_members() -> None:
    """A name that goes or comes is a change for users: CHANGELOG.md says it."""
    names = """
        ALGORITHMS Algorithm Choice ClientData Codec Comparison DataOptions DfcaError DfcaWarning LocalOptions Metrics
        Result Setting Simulation Split StoredRun Task TopologyOptions View __version__ cnn cnn1d load_run lowest
        make_graph make_split make_task map_npz mlp simulate split_from
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
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(ROOT / "tests/golden/0.2/runs/rounds", tmp_path / "runs/quickstart")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        module = importlib.import_module(name)
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


def public_objects() -> dict[str, Any]:
    """Return every public function and class, and the public methods of the classes."""
    objects = {}
    for module in (dfca, dfca.contracts, dfca.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isfunction(value) and not inspect.isclass(value):
                continue
            objects[name] = value
            ours = [base for base in getattr(value, "__mro__", ()) if base.__module__.startswith("dfca.api")]
            members = {name: member for base in (value, *ours) for name, member in vars(base).items()}
            for inner, method in members.items() if inspect.isclass(value) else ():
                method = getattr(method, "__func__", method)
                if not inner.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                    objects[f"{name}.{inner}"] = method
    return objects


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_docstrings_are_complete(name: str) -> None:
    """Args and Returns of the signature, an example, which `test_examples_run` runs, and the meaning of fields.

    A field is described in the docstring or, in a table of settings, where it is declared.
    """
    value = public_objects()[name]
    text = inspect.getdoc(value) or ""
    assert text
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        named = [name for name in signature.parameters if name not in ("self", "cls")]
        assert [name for name in named if not re.search(rf"^    \*{{0,2}}{name}: ", text, re.MULTILINE)] == []
        assert ("\nReturns:\n" in text) == (signature.return_annotation != "None")
        assert "Raises " not in text
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not field.metadata.get("description")]
        assert [field.name for field in fields if f"    {field.name}: " not in text] == []
    if inspect.isclass(value) and issubclass(value, BaseModel):
        assert all(field.description for field in value.model_fields.values())
    if "." not in name:
        assert ">>> " in text


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
    """`SimulateOptions` names the keywords of `simulate` and the options that it passes on."""
    named = set(inspect.signature(dfca.simulate).parameters)
    made = {"split", "graph", "make_model", "local"}  # of the arguments
    passed_on = {field.name for field in dataclasses.fields(dfca.Setting)} - made | set(StepTable.descriptions())
    assert set(SimulateOptions.__annotations__) | {"model", "data", "algorithm", "rounds", "seed", "options"} == (
        named | passed_on
    )


def test_the_bibtex_entries_say_what_citation_cff_says() -> None:
    said = bibtex()
    for line in (ROOT / "CITATION.cff").read_text().splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        if key in ("title", "family-names", "given-names", "journal", "notes", "version", "license", "name"):
            assert value.strip('"') in said.replace("{", "").replace("}", ""), line
