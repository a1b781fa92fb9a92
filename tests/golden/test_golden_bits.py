"""The numbers of released versions come out again: tiny runs of every algorithm, and swarms of peers from any phase.

`make.py` says what is stored. Where a version changes numbers on purpose it stores its own; the newest counts.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import SWARMS, VERSIONS, Swarm, bit_cases, bits_of, differences

NEWEST = VERSIONS[-1]
STATES = sorted(path for version in VERSIONS for path in (version / "peers").glob("*.json.gz"))


@pytest.mark.parametrize(("name", "algorithm", "options"), bit_cases(), ids=[name for name, *_ in bit_cases()])
def test_a_tiny_run_computes_the_same(name: str, algorithm: str, options: dict[str, Any]) -> None:
    stored = json.loads((NEWEST / "bits.json").read_text())
    if name not in stored:
        pytest.skip(f"{name} is newer than {NEWEST.name}")
    assert differences(stored[name], bits_of(algorithm, options), 1e-9) == []


def test_every_stored_number_is_computed() -> None:
    assert json.loads((NEWEST / "bits.json").read_text()).keys() <= {name for name, *_ in bit_cases()}


@pytest.mark.parametrize("name", SWARMS)
def test_a_swarm_ends_as_it_did(name: str) -> None:
    stored = json.loads((NEWEST / "peers" / "ends.json").read_text())
    assert differences(stored[name], Swarm(name).run().outcome(), 1e-12) == []


@pytest.mark.parametrize("path", STATES, ids=lambda path: f"{path.parts[-3]} {path.name.removesuffix('.json.gz')}")
def test_a_swarm_goes_on_from_a_stored_state(path: Path) -> None:
    name, stored = path.name.split(".")[0], json.loads(gzip.decompress(path.read_bytes()))
    ends = json.loads((path.parent / "ends.json").read_text())[name]
    swarm = Swarm.unpack(name, stored)
    assert swarm.phases() == stored["phases"]
    packed = json.loads(json.dumps(swarm.pack()))
    again = Swarm.unpack(name, packed)
    assert again.pack() == packed, "a state that is stored again is the same"
    assert differences(ends, swarm.run().outcome(), 1e-12) == []
    assert differences(ends, again.run().outcome(), 1e-12) == []
