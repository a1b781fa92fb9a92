"""Contracts of every algorithm, for your tests too.

    def test_mine_keeps_the_contracts():
        check_algorithm("my_module:mine")

Six clients in two clusters are run through the simulator and one by one (`dfca.testing`), in double precision; this
takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import networkx as nx
import torch
from torch import Tensor, nn

from dfca import algorithms
from dfca.base.errors import DfcaError
from dfca.core.algorithm import Algorithm, Choice, View
from dfca.core.client import Client
from dfca.core.learning.local import LocalOptions
from dfca.core.learning.parts import layout_of
from dfca.core.state import ClientState, Message
from dfca.data.clients import Split
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.testing import lockstep, make_clients, stack

__all__ = ["CONTRACTS", "ContractError", "check_algorithm", "make_setting"]

CLIENTS, CLUSTERS = 6, 2
Record = TypeVar("Record", View, Choice)


class ContractError(AssertionError):
    """An algorithm breaks a contract; the message says which, and what to look at.

    Example:
        >>> import dfca
        >>> from dfca.contracts import ContractError, check_algorithm
        >>> broken = dfca.Algorithm("broken", start="own", exchange="none", choose=lambda view: dfca.Choice(7))
        >>> try:
        ...     check_algorithm(broken)
        ... except ContractError as error:
        ...     print(str(error)[:54])
        broken breaks the contract 'same seed same bits': choo
    """


def check_algorithm(algorithm: Algorithm | Callable[[], Algorithm] | str) -> None:
    """Run an algorithm through every contract.

    Args:
        algorithm: A record, a function that makes one, a name, or "module:function".

    Raises:
        ContractError: If it breaks a contract.
        ConfigError: If there is no algorithm of that name.

    Example:
        >>> check_algorithm("dfca-gi")
    """
    record = algorithm
    if not isinstance(record, Algorithm):
        record = algorithms.get(record) if isinstance(record, str) else record()
    if not isinstance(record, Algorithm):
        raise ContractError(f"an algorithm must be an Algorithm, got {type(record).__name__}")
    parts = {name: getattr(record, name) for name in ("choose", "personal", "memory", "mixture")}
    own: dict[str, Any] = {name: _blamed(record.name, name, part) for name, part in parts.items() if part is not None}
    if (peers := record.peers) is not None:
        calls: dict[str, Any] = {
            name: _blamed(record.name, f"peers.{name}", getattr(peers, name)) for name in ("draw", "merge")
        }
        own["peers"] = replace(peers, **calls)
    guarded = replace(record, **own)
    for contract in CONTRACTS:
        try:
            contract(guarded)
        except ContractError:
            raise
        except Exception as error:
            about = "" if isinstance(error, DfcaError) else f"{contract.__doc__} "
            name = contract.__name__.replace("_", " ").strip()
            raise ContractError(f"{record.name} breaks the contract {name!r}: {about}{error}".rstrip()) from error


def _blamed(algorithm: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the user whose own exceptions say where they come from."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # it raises what it likes
            place, said = extract_tb(error.__traceback__)[-1], (str(error).splitlines() or [""])[0]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            raise ContractError(f"{name} of {algorithm} raises {type(error).__name__}: {said} ({where})") from error

    return call


def make_setting(algorithm: Algorithm, **changes: object) -> Setting:
    """Make a toy setting: labels are one linear rule per cluster, separable and clearly different.

    Args:
        algorithm: The algorithm that it runs.
        **changes: Other values of fields of `dfca.Setting`.

    Returns:
        A setting of 6 clients in 2 clusters on a ring, in double precision.

    Example:
        >>> import dfca
        >>> make_setting(dfca.ALGORITHMS["ifca"](), rounds=2).clients
        6
    """
    generator = torch.Generator().manual_seed(0)
    rules = torch.randn(CLUSTERS, 4, 3, generator=generator, dtype=torch.float64)

    def draw(count: int, cluster: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        return x, (x @ rules[cluster]).argmax(dim=1)

    truth = [i % CLUSTERS for i in range(CLIENTS)]
    train, test = ([draw(count, cluster) for cluster in truth] for count in (12, 8))
    setting = Setting(
        split=Split.of_clients(train, test, clusters=truth, classes=3),
        graph=nx.cycle_graph(CLIENTS),
        make_model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        algorithm=algorithm,
        clusters=CLUSTERS,
        rounds=4,
        seed=3,
        local=LocalOptions(steps=2, learning_rate=0.2),
        evaluate_every=2,
        dtype=torch.float64,
        personal_steps=0,  # not part of a round, and many steps
    )
    return replace(setting, **changes)  # type: ignore[arg-type]


def _same_seed_same_bits(algorithm: Algorithm) -> None:
    """The same seed gives the same models; draw only from view.random()."""
    one, two = (_finish(make_setting(algorithm)) for _ in range(2))
    assert torch.equal(one.banks, two.banks)
    assert one.assignments.tolist() == two.assignments.tolist()


def _choose_is_a_pure_function(algorithm: Algorithm) -> None:
    """`choose` reads its view and nothing else, and writes nothing; what must last is a memory, never a global."""
    seen: list[tuple[View, Choice]] = []

    def watched(view: View) -> Choice:
        before = _copied(view)
        choice = algorithm.choose(view)
        assert _alike(before, view), "it wrote into its view"
        seen.append((before, _copied(choice)))
        return choice

    _finish(make_setting(replace(algorithm, choose=watched)))
    for view, choice in reversed(seen):
        again = algorithm.choose(_copied(view))
        assert _alike(choice, again), f"it chose {choice.cluster} and later {again.cluster} for the same view"


def _copied(record: Record) -> Record:
    tensors: dict[str, Any] = {k: v.clone() for k, v in record._asdict().items() if isinstance(v, Tensor)}
    return record._replace(**tensors)


def _alike(one: View | Choice, other: View | Choice) -> bool:
    """Compare all but the random stream, bit by bit."""
    for name, value in one._asdict().items():
        twin = getattr(other, name)
        if isinstance(value, Tensor) and isinstance(twin, Tensor):
            if value.shape != twin.shape or not torch.equal(value.nan_to_num(), twin.nan_to_num()):
                return False
        elif name != "random" and value != twin:
            return False
    return True


def _mixtures_are_weights(algorithm: Algorithm) -> None:
    """The weights of a mixture are (m,), at least 0, and their sum is 1; so are a choice's weights at least 0."""
    if algorithm.mixture is not None:
        simulation = _finish(make_setting(algorithm))
        assert simulation.start.memory is not None
        for memory in simulation.start.memory:
            weights = algorithm.mixture(memory)
            assert weights.shape == (simulation.models,), f"they have the shape {tuple(weights.shape)}"
            fits = bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-6
            assert fits, f"they are {[round(weight, 4) for weight in weights.tolist()]}"

    def watched(view: View) -> Choice:
        choice = algorithm.choose(view)
        assert choice.weights is None or bool((choice.weights >= 0).all()), "a choice has weights that are not >= 0"
        return choice

    _finish(make_setting(replace(algorithm, choose=watched)))


def _inputs_stay_as_they_are(algorithm: Algorithm) -> None:
    """Samples and graph are read, never written."""
    setting = make_setting(algorithm)
    x, edges = setting.split.train.x.clone(), list(setting.graph.edges)
    _finish(setting)
    assert torch.equal(setting.split.train.x, x)
    assert list(setting.graph.edges) == edges


def _simulator_and_clients_agree(algorithm: Algorithm) -> None:
    """The vectorised simulator computes what the clients do one by one; `choose` may look at its view only."""
    setting = make_setting(algorithm)
    torch.testing.assert_close(_banks_of_all(_finish(setting)), stack(lockstep(setting)), rtol=1e-8, atol=1e-8)


def _only_what_the_record_says_is_trained(algorithm: Algorithm) -> None:
    """A round changes the chosen model, or all where the record says so; of the others the common body alone."""
    for client, before in _begun(algorithm):
        after, messages = client.start_round(before)
        layout = layout_of(client.model, algorithm)
        for j, expected in enumerate(before.bank.clone()):
            if algorithm.trains == "all" or j == after.assignment:
                continue
            for columns in () if layout is None else layout.common:
                expected[columns] = after.bank[after.assignment, columns]
            assert torch.equal(expected, after.bank[j]), f"model {j} changed too"
        for message in messages:
            for columns in () if layout is None else layout.private:
                assert not message.model[columns].any(), "a head that is private was sent"


def _what_is_received_cannot_harm(algorithm: Algorithm) -> None:
    """Messages that are not finite, of another shape or of an unknown cluster change nothing."""
    client, state = next(_begun(algorithm))
    poison = state.bank[0].clone()
    poison[3] = float("nan")
    for message in (
        Message(1, 0, 0, 2, poison),
        Message(1, 0, 0, 2, state.bank[0][:-1]),
        Message(1, len(state.bank), 0, 2, state.bank[0]),
    ):
        assert torch.equal(client.rules.receive(state, message).bank, state.bank)


def _training_helps(algorithm: Algorithm) -> None:
    """After 24 rounds on a complete graph the models are better than after 6."""
    setting = make_setting(algorithm, rounds=24, evaluate_every=6, graph=nx.complete_graph(CLIENTS))
    simulation = Simulation(setting)
    steps = (simulation.step() for _ in range(setting.rounds))
    rows = [row for row in steps if row is not None]
    better = rows[-1]["train_loss"] < 0.95 * rows[0]["train_loss"] or rows[-1]["accuracy"] > rows[0]["accuracy"]
    assert better, f"the training loss went from {rows[0]['train_loss']:.3f} to {rows[-1]['train_loss']:.3f}"


CONTRACTS: tuple[Callable[[Algorithm], None], ...] = (
    _same_seed_same_bits,
    _choose_is_a_pure_function,
    _mixtures_are_weights,
    _inputs_stay_as_they_are,
    _simulator_and_clients_agree,
    _only_what_the_record_says_is_trained,
    _what_is_received_cannot_harm,
    _training_helps,
)


def _begun(algorithm: Algorithm) -> Iterator[tuple[Client, ClientState]]:
    setting = make_setting(algorithm)
    simulation = Simulation(setting)
    for client in make_clients(setting):
        yield client, ClientState.of(simulation.bank(client.id), client.first_memory(simulation.models))


def _finish(setting: Setting) -> Simulation:
    simulation = Simulation(setting)
    while not simulation.done:
        simulation.step()
    return simulation


def _banks_of_all(simulation: Simulation) -> Tensor:
    return simulation.banks.expand(-1, CLIENTS, -1)
