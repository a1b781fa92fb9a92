"""The numbers of released versions come out again: tiny runs of every algorithm, and swarms of peers from any phase.

`make.py` says what is stored. Numbers that changed on purpose since the newest version are in next.json.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import NEXT, SWARMS, VERSIONS, Swarm, bit_cases, bits_of, differences

NEWEST = VERSIONS[-1]
CHANGED = json.loads(NEXT.read_text())
BITS = json.loads((NEWEST / "bits.json").read_text()) | CHANGED["bits"]
STATES = sorted(path for version in VERSIONS for path in (version / "peers").glob("*.json.gz"))


@pytest.mark.parametrize(("name", "algorithm", "options"), bit_cases(), ids=[name for name, *_ in bit_cases()])
def test_a_tiny_run_computes_the_same(name: str, algorithm: str, options: dict[str, Any]) -> None:
    if name not in BITS:
        pytest.skip(f"{name} is newer than {NEWEST.name}")
    assert differences(BITS[name], bits_of(algorithm, options), 1e-9) == []


def test_every_stored_number_is_computed() -> None:
    assert BITS.keys() <= {name for name, *_ in bit_cases()}


@pytest.mark.parametrize("name", SWARMS)
def test_a_swarm_ends_as_it_did(name: str) -> None:
    stored = json.loads((NEWEST / "peers" / "ends.json").read_text()) | CHANGED["ends"]
    assert differences(stored[name], Swarm(name).run().outcome(), 1e-12) == []


@pytest.mark.parametrize("path", STATES, ids=lambda path: f"{path.parts[-3]} {path.name.removesuffix('.json.gz')}")
def test_a_swarm_continues_from_a_stored_state(path: Path) -> None:
    name, stored = path.name.split(".")[0], json.loads(gzip.decompress(path.read_bytes()))
    ends = json.loads((path.parent / "ends.json").read_text())[name]
    swarm = Swarm.unpack(name, stored)
    if name not in CHANGED["ends"]:
        assert swarm.phases() == stored["phases"]
    packed = json.loads(json.dumps(swarm.pack()))
    again = Swarm.unpack(name, packed)
    assert again.pack() == packed, "a state that is stored again is the same"
    outcome = again.run().outcome()
    if name not in CHANGED["ends"]:
        assert differences(ends, outcome, 1e-12) == []
    else:  # it ends by other numbers, but as far, and all together
        assert all(peer["round"] >= end["round"] for peer, end in zip(outcome, ends, strict=True))
        assert all(peer["lineage"] == outcome[0]["lineage"] for peer in outcome)
