"""What a release is made of: declared Pythons and addresses, pinned tools, what a wheel and an sdist must hold."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from tests.release import run

PROJECT = tomllib.loads((run.ROOT / "pyproject.toml").read_text())["project"]


def test_what_a_wheel_or_an_sdist_lacks_is_named() -> None:
    info = "dfca-1.0.dist-info"
    whole = ["dfca/py.typed", "dfca/a.toml", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"]
    assert run.missing_in_wheel(whole, "1.0", ["dfca/a.toml"]) == set()
    assert run.missing_in_wheel(whole[2:], "1.0", ["dfca/a.toml"]) == set(whole[:2])
    whole = [f"dfca-1.0/{name}" for name in (*run.IN_SDIST, "src/dfca/a.toml")]
    assert run.missing_in_sdist(whole, "1.0", ["dfca/a.toml"]) == set()
    assert run.missing_in_sdist(whole[1:], "1.0", ["dfca/b.toml"]) == {"dfca-1.0/LICENSE", "dfca-1.0/src/dfca/b.toml"}


def test_the_files_that_it_asks_for_exist() -> None:
    assert all((run.ROOT / name).exists() for name in (*run.IN_SDIST, "charts/dfca-node/Chart.yaml"))
    assert {"dfca/py.typed", "dfca/data/sources.toml"} <= set(run.package_files())


def test_every_extra_is_installed_but_those_of_maintainers() -> None:
    assert {*run.user_extras(), "dev", "release"} == set(PROJECT["optional-dependencies"])
    assert set(run.WITHOUT_DEPENDENCIES) <= set(run.user_extras())
    command = [sys.executable, run.__file__, "nodes"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: no extra nodes; there are node, discovery, ")


def test_the_tools_are_pinned_and_no_part_of_the_tests() -> None:
    pinned = {line.partition("==")[0].lower() for line in (run.ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["optional-dependencies"]
    assert set(extras["release"]) <= pinned
    assert not set(extras["release"]) & set(extras["dev"])


def test_the_declared_pythons_begin_with_the_one_required() -> None:
    declared = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    assert declared == ["11", "12", "13"]
    assert PROJECT["requires-python"] == f">=3.{declared[0]}"


def test_addresses_are_placeholders_until_the_list_of_what_is_left_says_otherwise() -> None:
    """Who replaces them removes this test and the first point of the list."""
    assert "[project.urls]" in run.LEFT
    assert all(address.startswith("https://example.org/dfca") for address in PROJECT["urls"].values())
