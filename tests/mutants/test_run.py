"""The mutants that `run.py` makes of a function, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import run

SOURCE = '''
class Box:
    def put(self, item: int, most: int = 3) -> bool:
        """Put an item in."""
        assert item >= 0
        if item < most and not self.closed:
            self.items.append(item + 1)
            self.count += 1
            return True
        self.last = max(item, most)
        return False
'''
MADE = [
    "without and item < most",
    "without and not self.closed",
    "item < most -> <=",
    "not self.closed -> self.closed",
    "no self.items.append(item + 1)",
    "item + 1 -> -",
    "no self.count += 1",
    "True -> False",
    "no self.last = max(item, most)",
    "max(item, most) -> min",
    "False -> True",
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "box.py").write_text(SOURCE)
    return tmp_path


def test_the_operators(package: Path) -> None:
    source = run.Source(package / "box.py")
    ((name, function),) = source.functions(None)
    made = dict(source.mutants(function))
    assert name == "Box.put"
    assert sorted(made) == sorted(MADE)
    for what, text in made.items():
        compile(text, what, "exec")
        assert sum(one != other for one, other in zip(SOURCE.splitlines(), text.splitlines(), strict=True)) == 1
    assert "if item <= most and not self.closed:" in made["item < most -> <="]
    assert "if ((not self.closed)):" in made["without and item < most"]


def test_reasons_and_names_that_are_not_in_the_source_are_stale(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "boxes.toml").write_text(
        """
        tests = ["tests/test_box.py"]
        mutant = [
          {name = "open", file = "box.py", old = "not self.closed", new = "True"},
          {name = "gone", file = "box.py", old = "self.lid", new = "None"},
          {name = "twice", file = "box.py", old = "most", new = "least"},
        ]
        [[functions]]
        file = "box.py"
        names = ["Box.put", "Box.take"]
        alive = {"Box.put: item + 1 -> -" = "why not", "Box.put: item + 2 -> -" = "it went"}
        """
    )
    monkeypatch.setattr(run, "HERE", tables)
    mutants = list(run.read_tables(package))
    assert len(mutants) == 3 + len(MADE) + 2
    assert [mutant.name for mutant in mutants if mutant.alive] == ["Box.put: item + 1 -> -"]
    stale = [mutant for mutant in mutants if not mutant.source]
    assert [mutant.name for mutant in stale] == ["gone", "twice", "Box.take", "Box.put: item + 2 -> -"]
    monkeypatch.setattr(run, "prepare", lambda folder: package)
    assert run._try_all(stale, 1.0, show=False) == 1
    assert "stale: box.py: gone" in capsys.readouterr().out
