"""Every `dfca ...` command that a document or a help text shows is one that the command line takes."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dfca import algorithms
from dfca.cli import app
from dfca.experiment.load import load_experiment
from dfca.experiment.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")),
]
PRESETS = {path.stem for path in (ROOT / "src/dfca/experiment/presets").glob("*.toml")}
KEYS = {key.name for key in reference()}


def text_of(page: Path) -> str:
    """Read a page; of a notebook its cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join(
        "```\n" + "".join(cell["source"]) + "\n```" if cell["cell_type"] == "code" else "".join(cell["source"])
        for cell in cells
    )


def shown(text: str) -> Iterator[str]:
    """Yield the commands of a text: lines of code blocks behind a prompt, and what stands in code quotes."""
    fences = re.compile(r"^```.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for block in fences.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for part in re.sub(r"^\s*(?:[A-Z]?[$!>]|%%?)\s*", "", line).split("&&"):
                yield part.strip()
    for quoted in re.findall(r"`([^`]+)`", fences.sub("", text)):
        yield " ".join(quoted.split())


def words_of(command: str) -> list[str] | None:
    """Split a command of dfca into its words, without comment and pipe; None where it is another command.

    >>> words_of("torchrun -m dfca run quickstart -q  # quiet"), words_of("make demo")
    (['run', 'quickstart', '-q'], None)
    """
    match = re.match(r"(?:\S*/bin/|(?:torchrun|python) .*-m )?dfca (?:--debug )?(.*)", command)
    if match is None or match[1].startswith("= "):
        return None
    words = shlex.split(re.split(r" [|;>&]+ |\s+#", f"{match[1]} ")[0])
    return [word for word in words if word not in ("...", "…", "\\")]


def read(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse the words of a command as the command line does; return its name and its parameters as they were typed.

    Raises what typer raises: an unknown command or option, or an option without its value.
    """
    command, name = get_command(app), "dfca"
    while commands := getattr(command, "commands", None):
        if not words or words[0].startswith("-"):
            break
        assert words[0] in commands, f"{name} has no command {words[0]}"
        name, command, words = f"{name} {words[0]}", commands[words[0]], words[1:]
    # What a text leaves out has no value here: "`dfca run --algorithms`".
    given, rest, _ = command.make_parser(command.context_class(command, info_name=name)).parse_args(args=[*words])
    assert not rest, f"{name} takes no {rest}"
    return name, given


def check(command: str) -> bool:
    """Check one command; return whether it is one of dfca."""
    words = words_of(command)
    if not words or not re.match(r"[a-z]+$|--", words[0]):
        return False
    if words[-1] in ("--set", "--agree", "--algorithms", "--format", "--out", "--transport", "--log", "--layer"):
        words = [*words, "VALUE"]
    name, given = read(words)
    if name in ("dfca run", "dfca swarm", "dfca show"):
        check_experiment(given)
    return True


def check_experiment(given: dict[str, Any]) -> None:
    """Check the words that name something: a preset, its scale and recipe, algorithms, keys."""
    experiment = given.get("experiment") or given.get("preset")
    if experiment and not re.search(r"\.toml$|^[A-Z]+$|/", experiment):
        assert experiment in PRESETS, f"no preset {experiment}"
        load_experiment(experiment, given.get("scale"), recipe=given.get("recipe"))
    for name in (given.get("algorithms") or "").split(","):
        if name and ":" not in name and not name.isupper():
            algorithms.get(name)
    for key in (word.partition("=")[0] for word in given.get("set_") or ()):
        own = re.fullmatch(r"algorithm\.[\w-]+\.\w+|KEY", key)
        assert own or key.removeprefix("grid.") in KEYS, f"no key {key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_taken(page: Path) -> None:
    for command in shown(text_of(page)):
        try:
            check(command)
        except Exception as error:
            pytest.fail(f"`{command}`: {error}")


def test_commands_of_the_help_are_taken() -> None:
    root: Any = get_command(app)
    commands = [*root.commands.values()]
    commands += itertools.chain.from_iterable(getattr(group, "commands", {}).values() for group in commands)
    texts = [inspect.getdoc(command.callback) or "" for command in commands if command.callback]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip().startswith("dfca ")]
    assert len(lines) > 20
    assert all(check(line) for line in lines)


def test_what_is_no_command_is_noticed() -> None:
    assert sum(words_of(command) is not None for page in PAGES for command in shown(text_of(page))) > 150
    for wrong in (
        "dfca run table1-emnist --scale hour -a dfca-gi",
        "dfca runs quickstart",
        "dfca node starts kitchen",
        "dfca run quickstarts",
        "dfca run quickstart --scale minute",
        "dfca run quickstart --algorithms dfca-go",
        "dfca run quickstart --set rouns=3",
        "dfca report run --caption",
    ):
        with pytest.raises(Exception, match=r".+"):
            check(wrong)
