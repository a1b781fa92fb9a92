"""Differential privacy: updates are clipped and noised, and epsilon that would not cover what is sent is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import make_toy_model, make_toy_setting, make_toy_split

import dfca
from dfca.base import accountant
from dfca.base.accountant import epsilon
from dfca.base.errors import ConfigError
from dfca.core.method import PrivacyOptions
from dfca.core.privacy import protect, simulated_noise
from dfca.experiment.config import Config
from dfca.experiment.load import load_experiment
from dfca.report.rows import RunReport
from dfca.report.tables import result_tables
from dfca.runs.runner import run
from dfca.runs.store.reading import load_run
from dfca.sim.events.pool import ClientPool
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Churn, preset
from dfca.sim.rounds.simulation import Simulation
from dfca.testing import lockstep, stack

needs_opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="epsilon is opacus's: pip install 'dfca[privacy]'"
)
MILD = PrivacyOptions(noise=0.01, clip=0.5)


def test_an_update_is_clipped_and_noised() -> None:
    before, options = torch.zeros(20_000), PrivacyOptions(noise=0.5, clip=2.0)
    drawn = simulated_noise(20_000, 0, 1, 2)
    far = torch.full((20_000,), 3.0)
    sent = protect(before, far, options, drawn)
    noise = protect(before, before, options, drawn)
    torch.testing.assert_close((sent - noise).norm(), torch.tensor(2.0), rtol=1e-3, atol=0.0)
    assert float(noise.std()) == pytest.approx(0.5 * 2.0, rel=0.02)
    near = torch.full((20_000,), 1e-4)
    torch.testing.assert_close(protect(before, near, options, drawn) - noise, near, atol=1e-6, rtol=0.0)


@needs_opacus
def test_epsilon_is_that_of_the_accountants_own_example() -> None:
    """opacus/tests/accountants_test.py: noise 1.5, sample rate 0.04, 90 epochs, delta 1e-5."""
    assert epsilon(1.5, int(90 / 0.04), 1e-5, rate=0.04) == pytest.approx(7.32911117143, abs=1e-3)


@needs_opacus
def test_epsilon_grows_with_rounds_and_falls_with_noise() -> None:
    assert epsilon(1.0, 0, 1e-5) == 0.0
    assert epsilon(1.0, 1, 1e-5) < epsilon(1.0, 10, 1e-5) < epsilon(0.5, 10, 1e-5)
    for noise, releases in ((0.01, 10), (50.0, 1)):  # the orders suffice for large and small ones
        rho = releases / (2 * noise**2)
        assert epsilon(noise, releases, 1e-5) <= 1.05 * (rho + 2 * (rho * 11.513) ** 0.5)
    assert epsilon(1e-200, 1, 1e-5) > 1e100  # beyond what the accountant can square
    assert 0 <= epsilon(1e200, 1, 1e-5) < 0.1
    assert epsilon(5.0, 1, 0.5) == 0.0


@needs_opacus
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfedavgm", "ifca", "fedavg"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_rounds_equal_lockstep(algorithm: str, engine: str) -> None:
    setting = make_toy_setting(algorithm, rounds=3, privacy=MILD, engine=engine)
    simulation, states = Simulation(setting), lockstep(setting)
    rows = [row for row in (simulation.step() for _ in range(3)) if row is not None]
    torch.testing.assert_close(simulation.banks.expand(-1, 6, -1), stack(states), rtol=1e-9, atol=1e-11)
    assert rows[-1]["epsilon"] == simulation.epsilon == epsilon(0.01, 3, 1e-5)
    assert any("3 rounds cost a client epsilon" in note for note in simulation.notes)
    assert any("which cluster" in note for note in simulation.notes) == (setting.algorithm.models != "one")


@needs_opacus
@pytest.mark.parametrize("algorithm", ["dfca-gi", "dfedpgp", "dfedavgm", "ifca", "fedavg"])
def test_the_ideal_world_equals_rounds_and_every_client_counts_its_own_updates(algorithm: str) -> None:
    setting = make_toy_setting(algorithm, rounds=3, privacy=MILD, aggregation="batch")
    ideal, rounds = EventSimulation(setting), Simulation(setting)
    metrics = ideal.run().metrics
    for _ in range(3):
        rounds.step()
    torch.testing.assert_close(ideal.banks, rounds.banks, rtol=1e-9, atol=1e-11)
    assert metrics[-1]["epsilon"] == epsilon(0.01, 3, 1e-5)
    assert any("3 rounds cost a client epsilon" in note for note in ideal.notes)
    ideal.pool.releases[2] = 7
    again = EventSimulation(setting)
    again.restore(*ideal.state())
    assert again.pool.epsilon == epsilon(0.01, 7, 1e-5)


@needs_opacus
def test_a_round_that_is_trained_again_has_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    world = replace(preset("mobile"), churn=Churn(leaves_per_s=1 / 8, away_s=3.0, keeps=False))
    simulation = EventSimulation(make_toy_setting("dfca-gi", rounds=12, privacy=MILD, aggregation="batch"), world)
    left, settle = [], ClientPool.settle

    def note(pool: ClientPool, client: int, trained: Any) -> None:
        settle(pool, client, trained)
        left.append((client, pool.sent_noises[client]))

    monkeypatch.setattr(ClientPool, "settle", note)
    simulation.run()
    assert len(left) == sum(simulation.pool.releases) > 50
    assert len(set(left)) == len(left)


@needs_opacus
def test_what_epsilon_would_not_cover_is_refused() -> None:
    for algorithm in ("dfca-auto", "dfca-fi"):
        with pytest.raises(ConfigError, match=r"beside its noised updates.* use dfca-gi"):
            make_toy_setting(algorithm, privacy=MILD)
    with pytest.raises(ConfigError, match="sends losses on held-out samples"):
        make_toy_setting("dfca-gi", privacy=MILD, personal_steps="auto")
    assert make_toy_setting("local", privacy=MILD).privacy is None
    options: dict[str, Any] = {"rounds": 1, "topology": "ring"}
    result = dfca.simulate(make_toy_model, make_toy_split(), "dfca-gi", privacy={"noise": 1.0}, **options)
    assert result.evaluations[-1]["epsilon"] == pytest.approx(epsilon(1.0, 1, 1e-5))


WRONG = {
    "noise": (0, r"privacy\.noise must be > 0.*without noise epsilon is infinite"),
    "clip": (0.0, r"privacy\.clip must be > 0"),
    "delta": (1.0, r"privacy\.delta must be"),
}


@pytest.mark.parametrize("key", WRONG)
def test_epsilon_without_noise_and_other_numbers_are_refused(key: str) -> None:
    value, sentence = WRONG[key]
    with pytest.raises(ConfigError, match=sentence):
        PrivacyOptions(**{"noise": 1.0, key: value})
    plain = {"clients": 4, "clusters": 2, "rounds": 2, "algorithms": ["dfca-gi"], "data": {"name": "digits"}}
    with pytest.raises(ConfigError, match=sentence.split(".*")[0]):
        Config.of(plain | {"privacy": {"noise": 1.0, key: value}})


def test_without_the_accountant_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dfca\[privacy\]'"):
        make_toy_setting("dfca-gi", privacy=MILD)


@needs_opacus
def test_the_preset_shows_epsilon(tmp_path: Path) -> None:
    changes = ["clients=8", "rounds=2", "seeds=1", "topology.name=ring"]
    run(load_experiment("private", overrides=changes, algorithms=["dfca-gi", "fedavg"]), tmp_path / "run", workers=1)
    report = RunReport.of(load_run(tmp_path / "run"))
    noises = [0.01, 0.1, 0.2, 0.3, 0.5, 1.0]
    shown = {row.point["privacy.noise"]: row.epsilon for row in report.rows if row.algorithm == "dfca-gi"}
    assert shown == {noise: epsilon(noise, 2, 1e-5) for noise in noises}
    (table,) = [table for table in result_tables(report) if table.title == "epsilon"]
    assert [cell.text for cell in table.rows[-1]] == ["1.0", "7.08", "7.08"]
