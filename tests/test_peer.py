"""One peer alone, driven by scripts of inputs, does what they say (peer_scripts/*.txt; format: peer_script.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from peer_script import Script

SCRIPTS = sorted((Path(__file__).parent / "peer_scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_peer_does_what_its_script_says(path: Path) -> None:
    text = path.read_text()
    done = "\n".join(Script().run(part).rstrip("\n") + "\n" for part in text.split("\n\n"))
    if "DFCA_REWRITE" in os.environ:
        path.write_text(done)
    assert done == text
