"""Several ranks compute what one process does: real processes, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranked import play, worlds
from safetensors.torch import load_file

HERE = Path(__file__).parent


def torchrun(ranks: int, *command: str | Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *map(str, command)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[2, 3])
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranked")
    command = torchrun(request.param, HERE / "ranked.py", out)
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
    return out


@pytest.mark.parametrize("world", worlds())
def test_ranks_equal_one_process(world: str, ranked: Path) -> None:
    bank, rows = play(worlds()[world])
    torch.testing.assert_close(load_file(ranked / "banks.safetensors")[world], bank, rtol=1e-9, atol=1e-11)
    told = json.loads((ranked / "rows.json").read_text())[world]
    assert len(told) == len(rows)
    for here, there in zip(rows, told, strict=True):
        assert here.keys() == there.keys()
        for key, value in here.items():
            if key in ("disagreement", "mixing_drift"):
                assert there[key] == pytest.approx(value, rel=1e-6, abs=1e-12)
            elif isinstance(value, float):
                assert there[key] == pytest.approx(value, rel=1e-9)
            elif key != "election":
                assert there[key] == value, key
