"""Graphs: what each topology promises, what `describe` measures, and the sentence of every bad value."""

from __future__ import annotations

import json
import math

import networkx as nx
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dfca import topology
from dfca.base.errors import ConfigError
from dfca.topology import (
    TOPOLOGIES,
    USES,
    TopologyOptions,
    check_topology,
    describe,
    layout,
    make_graph,
    pairs_without_trainer,
    spectral_gap,
    summary,
)

MADE = [name for name in TOPOLOGIES if name != "file"]


def make(name: str, clients: int, seed: int = 0, **options: object) -> nx.Graph:
    return make_graph(TopologyOptions.model_validate({"name": name, **options}), clients, seed)


def refuse(name: str, clients: int, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make(name, clients, **options)
    return str(caught.value)


# --- contracts that every topology keeps


@pytest.mark.parametrize("name", MADE)
def test_every_topology_is_a_simple_graph_on_the_clients_and_repeats(name: str) -> None:
    graph = make(name, 24, seed=3)
    assert list(graph) == list(range(24))
    assert nx.number_of_selfloops(graph) == 0
    assert not graph.is_directed()
    assert not graph.is_multigraph()
    assert list(graph.edges) == list(make(name, 24, seed=3).edges)


@pytest.mark.parametrize("name", MADE)
def test_a_single_client_has_no_neighbours(name: str) -> None:
    graph = make(name, 1)
    assert list(graph) == [0]
    assert graph.number_of_edges() == 0
    assert describe(graph)["spectral_gap"] == 1.0
    assert layout(graph, 0, name).shape == (1, 2)


@pytest.mark.parametrize("name", ["erdos-renyi", "regular", "small-world", "scale-free", "random-geometric"])
def test_random_topologies_follow_the_seed(name: str) -> None:
    assert set(make(name, 40, seed=0).edges) != set(make(name, 40, seed=1).edges)


@pytest.mark.parametrize("name", MADE)
def test_layout_places_every_client_in_the_square_and_repeats(name: str) -> None:
    graph = make(name, 24)
    places = layout(graph, 5, name)
    assert places.shape == (24, 2)
    assert np.abs(places).max() <= 1 + 1e-9
    assert len(np.unique(places.round(6), axis=0)) == 24
    np.testing.assert_array_equal(places, layout(graph, 5, name))


def test_every_topology_is_described_and_names_only_options_that_exist() -> None:
    assert set(USES) == set(TOPOLOGIES)
    assert {option for options in USES.values() for option in options} == set(TopologyOptions.model_fields) - {"name"}


# --- what each one promises


def test_erdos_renyi_links_the_share_p_of_all_pairs() -> None:
    assert make("erdos-renyi", 20, p=0).number_of_edges() == 0
    assert make("erdos-renyi", 20, p=1).number_of_edges() == 190
    edges = make("erdos-renyi", 240, p=0.1).number_of_edges()
    expected = 0.1 * 240 * 239 / 2
    assert abs(edges - expected) < 5 * math.sqrt(expected * 0.9)


def test_ring_path_of_two_and_triangle() -> None:
    assert set(make("ring", 2).edges) == {(0, 1)}
    assert {degree for _, degree in make("ring", 3).degree} == {2}
    assert nx.diameter(make("ring", 10)) == 5


@pytest.mark.parametrize(("clients", "rows", "columns"), [(4, 2, 2), (24, 4, 6), (25, 5, 5), (26, 2, 13)])
def test_torus_is_the_most_square_grid_with_joined_borders(clients: int, rows: int, columns: int) -> None:
    expected = nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns, periodic=True))
    assert {frozenset(e) for e in make("torus", clients).edges} == {frozenset(e) for e in expected.edges}
    if rows > 2:
        assert {degree for _, degree in make("torus", clients).degree} == {4}


def test_regular_gives_everybody_its_degree() -> None:
    assert {degree for _, degree in make("regular", 30, degree=5).degree} == {5}


def test_small_world_without_rewiring_is_a_lattice_and_keeps_its_links_with_it() -> None:
    assert {degree for _, degree in make("small-world", 20, degree=4, rewire=0).degree} == {4}
    assert make("small-world", 20, degree=4, rewire=1).number_of_edges() == 40


def test_scale_free_brings_its_links_and_has_hubs() -> None:
    graph = make("scale-free", 200, attach=2)
    assert graph.number_of_edges() == 2 * (200 - 2)
    assert max(degree for _, degree in graph.degree) > 12


def test_random_geometric_with_a_large_radius_is_complete() -> None:
    assert make("random-geometric", 12, radius=1.5).number_of_edges() == 66


def test_star_complete_and_tree() -> None:
    assert make("star", 6).degree[0] == 5
    assert make("complete", 6).number_of_edges() == 15
    tree = make("tree", 7)
    assert sorted(tree.neighbors(1)) == [0, 3, 4]
    assert nx.is_tree(make("tree", 24))


# --- files


def test_edge_list_with_comments_isolated_clients_self_loops_and_both_directions(tmp_path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("# who  knows whom\n0 1\n1 0\n\n2 2  # self\n1 3 {'weight': 2.0}\n")
    graph = make("file", 5, file=str(path))
    assert list(graph) == [0, 1, 2, 3, 4]
    assert set(graph.edges) == {(0, 1), (1, 3)}


def test_what_networkx_writes_is_read_back(tmp_path) -> None:
    graph = make("scale-free", 20)
    nx.write_edgelist(graph, tmp_path / "graph.edges")
    nx.write_graphml(graph.to_directed(), tmp_path / "graph.graphml")
    assert set(make("file", 20, file=str(tmp_path / "graph.edges")).edges) == set(graph.edges)
    assert set(make("file", 22, file=str(tmp_path / "graph.graphml")).edges) == set(graph.edges)


def test_graphml_ids_with_the_prefix_of_other_tools(tmp_path) -> None:
    nx.write_graphml(nx.relabel_nodes(nx.path_graph(3), lambda i: f"n{i}"), tmp_path / "g.graphml")
    assert set(make("file", 3, file=str(tmp_path / "g.graphml")).edges) == {(0, 1), (1, 2)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0 1\n1 7\n", "line 2: client 7 is out of 0..2; client numbers start at 0: renumber them, or set clients = 8"),
        ("0 1\n\n1 x\n", 'line 3: expected two client numbers such as "0 1", got "1 x"'),
        ("0 1 2\n", 'line 1: expected two client numbers such as "0 1", got "0 1 2"'),
        ("0 -1\n", 'line 1: expected two client numbers such as "0 1", got "0 -1"'),
    ],
)
def test_bad_lines_of_an_edge_list_are_named(tmp_path, text: str, sentence: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(text)
    assert refuse("file", 3, file=str(path)) == f'topology.file "{path}", {sentence}'


def test_bad_files(tmp_path) -> None:
    missing = tmp_path / "none.txt"
    assert refuse("file", 3, file=str(missing)) == (
        f'topology.file "{missing}" cannot be read: No such file or directory; give the path of a file'
    )
    broken = tmp_path / "broken.graphml"
    broken.write_text("<graphml><graph>")
    assert f'topology.file "{broken}" is not valid GraphML' in refuse("file", 3, file=str(broken))
    binary = tmp_path / "graph.bin"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    assert f'topology.file "{binary}" is not a text file' in refuse("file", 3, file=str(binary))
    named = tmp_path / "named.graphml"
    nx.write_graphml(nx.Graph([("anna", "bert")]), named)
    assert refuse("file", 3, file=str(named)) == (
        f'topology.file "{named}": node "anna" is not a client number; number the nodes 0..2'
    )


# --- bad values: one sentence each


@pytest.mark.parametrize(
    ("name", "clients", "options", "sentence"),
    [
        ("rign", 4, {}, 'unknown topology "rign"; did you mean "ring"? Known: '),
        ("ring", 0, {}, "clients must be >= 1, got 0; a graph needs at least one client"),
        ("erdos-renyi", 9, {"p": 1.5}, "topology.p must be in 0..1, got 1.5; it is the probability of a link"),
        ("erdos-renyi", 9, {"p": -0.1}, "topology.p must be in 0..1, got -0.1"),
        ("small-world", 9, {"rewire": 2.0}, "topology.rewire must be in 0..1, got 2.0"),
        ("small-world", 9, {"degree": 3}, "topology.degree must be even for a small-world graph"),
        ("small-world", 4, {"degree": 4}, "topology.degree must be in 1..3 for 4 clients, got 4"),
        ("regular", 9, {"degree": 9}, 'got 9; for a link between all clients use topology "complete"'),
        ("regular", 9, {"degree": 0}, "topology.degree must be in 1..8 for 9 clients, got 0"),
        (
            "regular",
            9,
            {"degree": 3},
            "topology.degree x clients must be even for a regular graph, got 3 x 9; take degree 2 or 10 clients",
        ),
        ("scale-free", 3, {"attach": 3}, "topology.attach must be in 1..2 for 3 clients, got 3"),
        ("random-geometric", 9, {"radius": 0.0}, "topology.radius must be > 0, got 0.0; from 1.42 on"),
        (
            "torus",
            23,
            {},
            "a torus needs rows x columns = clients with at least 2 rows, got 23 clients, which is prime; "
            'take 22 (2 x 11) or 24 (4 x 6) clients, or topology "ring"',
        ),
        ("torus", 2, {}, 'take 4 (2 x 2) clients, or topology "ring"'),
        ("file", 3, {}, 'topology "file" needs topology.file, the path of an edge list'),
        (
            "ring",
            3,
            {"file": "a.txt"},
            'topology.file is "a.txt" but topology.name is "ring"; set topology.name = "file"',
        ),
    ],
)
def test_bad_values_get_one_sentence(name: str, clients: int, options: dict, sentence: str) -> None:
    said = refuse(name, clients, **options)
    assert sentence in said
    assert "\n" not in said
    with pytest.raises(ConfigError):
        check_topology(TopologyOptions.model_validate({"name": name, **options}), clients)


def test_options_are_frozen_and_know_their_keys() -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        TopologyOptions.model_validate({"probability": 0.1})
    with pytest.raises(ValidationError, match="frozen"):
        TopologyOptions().p = 0.5  # type: ignore[misc]
    assert all(field.description for field in TopologyOptions.model_fields.values())


# --- measuring


def test_spectral_gap_of_ring_complete_and_star_in_closed_form() -> None:
    for n in (5, 12):  # circulant with 1/3 on each neighbour and itself
        eigenvalues = [abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * j / n)) for j in range(1, n)]
        assert spectral_gap(make("ring", n)) == pytest.approx(1 - max(eigenvalues))
    assert spectral_gap(make("complete", 9)) == 1.0
    assert spectral_gap(nx.complete_graph(2)) == 1.0
    assert spectral_gap(make("star", 8)) == pytest.approx(1 / 8)  # 1 - 1/N on leaves that differ


def test_spectral_gap_of_a_graph_in_parts_is_zero() -> None:
    assert spectral_gap(nx.empty_graph(3)) == 0.0
    assert spectral_gap(nx.disjoint_union(nx.complete_graph(3), nx.complete_graph(4))) == 0.0


@pytest.mark.parametrize(("name", "options"), [("erdos-renyi", {"p": 0.2}), ("ring", {}), ("star", {}), ("tree", {})])
def test_large_graphs_get_the_same_gap_by_lanczos(monkeypatch, name: str, options: dict) -> None:
    graph = make(name, 120, **options)
    dense = spectral_gap(graph)
    monkeypatch.setattr(topology, "DENSE_LIMIT", 10)
    assert spectral_gap(graph) == pytest.approx(dense, abs=1e-8)
    assert spectral_gap(graph) == spectral_gap(graph)


def test_pairs_without_trainer_by_hand() -> None:
    # 0 - 1 - 2, 3 alone; clusters 0 0 1 1. Heard: 0: {0}, 1: {0, 1}, 2: {0}, 3: nothing.
    graph = nx.empty_graph(4)
    graph.add_edges_from([(0, 1), (1, 2)])
    assert pairs_without_trainer(graph, [0, 0, 1, 1], 2) == 1 + 0 + 1 + 2
    assert pairs_without_trainer(graph, [0, 0, 1, 1], 3) == 4 + 4
    facts = describe(graph, torch.tensor([0, 0, 1, 1]))
    assert (facts["pairs_without_trainer"], facts["pairs"]) == (4, 8)
    with pytest.raises(ConfigError, match=r"one cluster for each of the 4 clients, got shape \(3,\)"):
        describe(graph, [0, 1, 1])


def test_describe_and_summary() -> None:
    graph = nx.empty_graph(5)
    graph.add_edges_from([(0, 1), (1, 2), (2, 0), (2, 3)])
    facts = describe(graph, [0, 0, 1, 1, 0])
    assert facts == json.loads(json.dumps(facts))
    assert facts == {
        "nodes": 5,
        "edges": 4,
        "components": 2,
        "isolated": 1,
        "degree_min": 0,
        "degree_max": 3,
        "degree_mean": 1.6,
        "spectral_gap": 0.0,
        "pairs_without_trainer": 3,
        "pairs": 10,
    }
    assert summary(facts) == (
        "5 clients, 4 edges, 2 components, 1 client without neighbours, degree 0–3 (mean 1.6), spectral gap 0.00; "
        "3 of 10 (client, cluster) pairs have no neighbour in that cluster"
    )
    assert summary(describe(nx.complete_graph(4))) == "4 clients, 6 edges, connected, degree 3, spectral gap 1.00"
    assert summary(describe(nx.complete_graph(4), [0, 0, 1, 1])).endswith(
        "; every client has a neighbour in every cluster"
    )
