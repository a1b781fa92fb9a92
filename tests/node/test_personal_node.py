"""The personal last step on a device: measured on what it holds out, used in what it exports, said in its status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from node_swarm import make_swarm
from safetensors import safe_open
from typer.testing import CliRunner

from dfca.base.errors import DataError
from dfca.cli import app
from dfca.core.learning.deployment import steps_of
from dfca.core.learning.local import held_out
from dfca.core.rules.personal import GRID
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.commands import load_model, predict_file
from dfca.node.operate.status import describe_personal, status_table
from dfca.node.service import make_work
from dfca.node.task.dataset import load
from dfca.node.task.facts import Facts
from dfca.node.task.learner import build
from dfca.node.work.worker import MOST_PERSONAL_SAMPLES, few
from dfca.peer.curves import CurvePool
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.peer.records.options import ENDLESS
from dfca.peer.records.work import Curve, OwnCurve, Personalise
from dfca.peer.state import VERSION, Saved


def make_device(tmp_path: Path, **agreed: Any) -> tuple[NodeFolder, torch.Tensor]:
    """Make a device of a swarm, and models (2, P) for it."""
    (folder,) = make_swarm(tmp_path, (0,), agreed={"clusters": 2, **agreed})
    model = build(folder.facts)
    torch.manual_seed(3)
    return folder, torch.stack([model.flat.flatten(model.make()) for _ in range(2)])


def keep(folder: NodeFolder, bank: torch.Tensor, best: int, cluster: int = 1) -> Saved:
    """Save models, and a curve by which this many steps are the best."""
    pool = CurvePool()
    pool.begin(3, OwnCurve(cluster, 20, torch.tensor([float(steps != best) for steps in GRID]).double()), ())
    zeros = (0,) * len(bank)
    saved = Saved(VERSION, 0, 0, 40, (), bank, cluster, zeros, zeros, zeros, zeros, curves=pool)
    folder.store().save(saved)
    return saved


def test_a_new_swarm_takes_the_step_of_its_algorithm_and_an_old_one_none(tmp_path: Path) -> None:
    folder, _ = make_device(tmp_path)
    assert folder.facts.personal == "auto"
    assert folder.facts.peer_options(1, ()).method.personal == "auto"
    assert folder.facts.peer_options(1, ()).rounds >= ENDLESS
    old = folder.facts.changed(personal=0)
    assert b"personal" not in old.to_bytes()  # it keeps its name
    assert Facts.from_bytes(old.to_bytes()) == old
    assert Facts.from_bytes(folder.facts.to_bytes()) == folder.facts


@pytest.mark.parametrize("rounds", [0, 40])
def test_a_curve_is_measured_on_what_the_device_holds_out(tmp_path: Path, rounds: int) -> None:
    folder, bank = make_device(tmp_path, rounds=rounds)
    samples, work = load(folder.config, folder.path, folder.facts), make_work(folder)
    client = work.samples.client
    mask = held_out(len(client.y), client.seed, client.id)
    train, held = ((client.x[~mask], client.y[~mask]), (client.x[mask], client.y[mask]))
    if not rounds:  # nothing would ever be released
        train, held = samples.train, samples.held_out
    cluster, count, losses = work.run(Curve(bank), None)
    assert count == len(held[1]) > 0
    torch.testing.assert_close(losses, torch.stack(list(steps_of(client).curve(bank[cluster], train, held))))


def test_exports_and_predictions_are_of_the_personal_model(tmp_path: Path) -> None:
    folder, bank = make_device(tmp_path)
    keep(folder, bank, best=20)
    samples = load(folder.config, folder.path, folder.facts)
    client = make_work(folder).samples.client
    expected = steps_of(client).take(bank[1], samples.train, 20)
    own = load_model(folder.path)
    assert (own.cluster, own.round, own.steps) == (1, 40, 20)
    torch.testing.assert_close(own.vector, expected)
    assert own.scores[1].loss < own.scores[0].loss
    for shared in (load_model(folder.path, shared=True), load_model(folder.path, cluster=1)):
        assert torch.equal(shared.vector, bank[1])
        assert shared.metadata()["personal_steps"] == "0"
        assert shared.describe() == "cluster 1, round 40, as the swarm has it"
    texts = [predict_file(folder.path, str(tmp_path / "0.csv"), shared=shared)[0] for shared in (False, True)]
    assert texts[0] != texts[1]
    assert texts[0].count("\n") == texts[1].count("\n") == 121

    out = tmp_path / "m.safetensors"
    done = CliRunner().invoke(app, ["node", "export", str(folder.path), "--safetensors", str(out)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "cluster 1, round 40, after 20 personal steps (held-out loss" in said
    assert "accuracy" in said
    with safe_open(out, "pt") as file:
        assert file.metadata()["personal_steps"] == "20"
    done = CliRunner().invoke(app, ["node", "export", str(folder.path), "--shared", "--safetensors", str(out)])
    assert "as the swarm has it" in " ".join(done.output.split())


def test_no_steps_are_taken_where_none_are_better_or_none_are_agreed_on(tmp_path: Path) -> None:
    folder, bank = make_device(tmp_path)
    saved = keep(folder, bank, best=0)
    assert load_model(folder.path).steps == 0
    folder.store().save(replace(saved, curves=CurvePool()))  # not measured yet, or of an older version
    assert load_model(folder.path).steps == 0


def test_a_swarm_may_agree_on_a_number_of_steps(tmp_path: Path) -> None:
    folder, bank = make_device(tmp_path, personal=7)
    keep(folder, bank, best=0)
    assert load_model(folder.path).steps == 7


def test_steps_without_their_samples_say_what_to_do(tmp_path: Path) -> None:
    folder, bank = make_device(tmp_path)
    keep(folder, bank, best=5)
    (tmp_path / "0.csv").unlink()
    with pytest.raises(DataError, match="the personal last step needs the samples: --shared does without it"):
        load_model(folder.path)
    assert torch.equal(load_model(folder.path, shared=True).vector, bank[1])


def test_a_status_says_what_was_picked_and_what_came_of_it(tmp_path: Path) -> None:
    from rich.console import Console

    folder, bank = make_device(tmp_path, rounds=40)
    saved, work = keep(folder, bank, best=5), make_work(folder)
    options = folder.facts.peer_options(folder.identity.number, ())
    peer = Peer(options, Memory(options.size, options.dtype), 1)
    assert describe_personal(peer, work) is None
    peer = Peer(options, Memory(options.size, options.dtype), 1, saved)
    described = describe_personal(peer, work)
    assert described == {"steps": 5, "round": 3, "samples": 20, "losses": [1.0, 0.0], "sweeps": 0}
    work.run(Personalise(5), bank)
    described = describe_personal(peer, work)
    assert described is not None
    assert 0 <= described["accuracy"] <= 1
    console = Console(width=200)
    with console.capture() as shown:
        console.print(status_table({"personal": described, "bytes_in": 0, "bytes_out": 0}))
    assert "5 steps before the model is used, loss 1 -> 0 on 20 held-out samples, then accuracy" in shown.get()
    keep(folder, bank, best=0)
    nothing = describe_personal(Peer(options, Memory(options.size, options.dtype), 1, folder.store().load()), work)
    with console.capture() as shown:
        console.print(status_table({"personal": nothing, "bytes_in": 0, "bytes_out": 0}))
    assert "none: on 20 held-out samples the swarm's model is the best" in shown.get()


def test_a_device_with_many_samples_takes_its_steps_on_some_of_them(tmp_path: Path) -> None:
    folder, _ = make_device(tmp_path)
    client = make_work(folder).samples.client
    x, y = torch.arange(10_000.0)[:, None], torch.arange(10_000)
    some = few((x, y), client)
    assert len(some[1]) == MOST_PERSONAL_SAMPLES == len(set(some[1].tolist()))
    assert torch.equal(some[0][:, 0].long(), some[1])
    assert torch.equal(few((x, y), client)[1], some[1])
    assert few((x[:9], y[:9]), client)[1] is not None
    assert len(few((x[:9], y[:9]), client)[1]) == 9
