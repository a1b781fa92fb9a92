"""[privacy] on devices: secret noise, epsilon in status and metrics, and what members are not told."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from node_swarm import make_swarm

from dfca.base import accountant
from dfca.base.accountant import epsilon
from dfca.base.errors import ConfigError
from dfca.core.algorithm import Choice
from dfca.core.state import changed
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.members import summarise
from dfca.node.operate.metrics import metrics_of
from dfca.node.operate.status import _facts, describe_privacy
from dfca.node.service import make_work
from dfca.node.task.facts import Facts
from dfca.node.task.learner import build, secret_noise
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer

needs_opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="epsilon is opacus's: pip install 'dfca[privacy]'"
)
PLAIN = {"algorithm": "dfca-gi", "clusters": 2, "personal": 0}
PRIVACY = {"noise": 0.5, "clip": 0.01}


def make_device(tmp_path: Path) -> NodeFolder:
    (folder,) = make_swarm(tmp_path, (0,), agreed={**PLAIN, "privacy": PRIVACY})
    return folder


def test_secret_noise_is_normal_and_never_the_same() -> None:
    draws = secret_noise(200_000)
    assert draws.dtype == torch.float64
    assert bool(draws.isfinite().all())
    assert float(draws.mean()) == pytest.approx(0, abs=0.02)
    assert float(draws.std()) == pytest.approx(1, abs=0.02)
    assert float((draws.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)
    assert not torch.equal(secret_noise(5), secret_noise(5))
    assert secret_noise(0).shape == (0,)


@needs_opacus
def test_what_a_device_trains_is_clipped_and_noised(tmp_path: Path) -> None:
    folder = make_device(tmp_path)
    client = make_work(folder).samples.client
    bank = client.start().bank
    first, second = (client.train(bank, Choice(1), 0) - bank[1] for _ in range(2))
    assert not torch.equal(first, second)
    length = (len(first) ** 0.5) * 0.5 * 0.01  # of the noise; the update itself is 0.01 long at most
    assert float(first.norm()) == pytest.approx(length, rel=0.25)
    assert make_work(folder).guard is None  # what it goes back to would be chosen by exact scores


@needs_opacus
def test_status_and_metrics_have_epsilon_and_members_are_told_no_scores(tmp_path: Path) -> None:
    options = make_device(tmp_path).facts.peer_options(3, ())
    peer = Peer(options, Memory(options.size, options.dtype), 0, None)
    assert describe_privacy(peer) == {"updates": 0, "epsilon": 0.0, "delta": 1e-5}
    peer.copies = changed(peer.copies, updates=(4, 6))
    said = describe_privacy(peer)
    assert said == {"updates": 10, "epsilon": epsilon(0.5, 10, 1e-5), "delta": 1e-5}
    status = {"privacy": said, "epsilon": said["epsilon"], "accuracy": 0.9, "round": 7, "problems": ["loss 3"]}
    assert dict(_facts(status))["privacy"] == "epsilon 48.8 at delta 1e-05, after 10 updates"
    families = {family.name: family for family in metrics_of(status)}
    assert families["dfca_epsilon"].samples[0].value == epsilon(0.5, 10, 1e-5)
    told = json.loads(summarise(status))
    assert "accuracy" not in told
    assert told["problems"] == []
    assert told["round"] == 7
    (tmp_path / "plain").mkdir()
    plain = make_swarm(tmp_path / "plain", (0,))[0].facts.peer_options(3, ())
    assert describe_privacy(Peer(plain, Memory(plain.size, plain.dtype), 0, None)) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": "dfca-auto"}, 'privacy is for dfca-gi, dfca-li, dfedavgm, got "dfca-auto", which sends losses'),
        ({"algorithm": "local"}, 'got "local", which sends losses or nothing'),
        ({"personal": "auto"}, "which epsilon would not cover; give a number of steps"),
        ({"privacy": {"noise": 0}}, r"privacy.noise must be > 0, got 0"),
        ({"privacy": {"clip": 1.0}}, r"privacy.noise is missing"),
    ],
)
def test_facts_whose_epsilon_would_mean_nothing_are_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (folder,) = make_swarm(tmp_path, (0,), agreed=PLAIN)
    assert b"privacy" not in folder.facts.to_bytes()  # swarms without it keep their names
    content = {**json.loads(folder.facts.to_bytes()), "privacy": PRIVACY, **changes}
    with pytest.raises(ConfigError) as caught:
        Facts.from_bytes(json.dumps(content).encode())
    assert sentence in str(caught.value)


def test_a_device_without_the_accountant_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dfca\[privacy\]'"):
        make_device(tmp_path)
    (tmp_path / "plain").mkdir()
    (folder,) = make_swarm(tmp_path / "plain", (0,), agreed=PLAIN)
    with pytest.raises(ConfigError, match=r"pip install 'dfca\[privacy\]'"):
        build(Facts.checked({**json.loads(folder.facts.to_bytes()), "privacy": PRIVACY}))
