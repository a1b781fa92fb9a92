"""The graph that nodes build from the roster: connected after any deaths, the same at both ends of a link."""

from __future__ import annotations

import hashlib
from base64 import b32encode
from collections.abc import Collection, Iterable

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.node.net.graph import SwarmGraph, chords


def wanted_links(own: str, members: Iterable[str], dead: Collection[str], degree: int) -> set[str]:
    return SwarmGraph(own, degree).links(dict.fromkeys(members), dead)


def defined_links(own: str, members: Iterable[str], dead: Collection[str], degree: int) -> set[str]:
    """Return the links as they are defined: by all chords of everybody."""
    live = sorted({member for member in members if member not in dead} | {own})
    if degree >= len(live) - 1:
        return set(live) - {own}
    place = live.index(own)
    ends = {member: chords(member, live, degree) for member in live}
    incoming = {member for member, reached in ends.items() if own in reached}
    return ({live[place - 1], live[(place + 1) % len(live)]} | ends[own] | incoming) - {own}


def device(number: int) -> str:
    return b32encode(hashlib.sha256(str(number).encode()).digest()).decode().rstrip("=").lower()


def graph_of(members: list[str], dead: set[str], degree: int) -> nx.Graph:
    graph = nx.Graph()
    live = [member for member in members if member not in dead]
    graph.add_nodes_from(live)
    graph.add_edges_from((own, other) for own in live for other in wanted_links(own, members, dead, degree))
    return graph


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 40), st.integers(2, 9), st.data())
def test_the_live_members_are_connected_after_any_deaths(size: int, degree: int, data: st.DataObject) -> None:
    members = [device(i) for i in range(size)]
    dead = set(data.draw(st.lists(st.sampled_from(members), max_size=size - 1, unique=True)))
    graph = graph_of(members, dead, degree)
    assert set(graph) == set(members) - dead
    assert nx.is_connected(graph)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 25), st.integers(2, 8), st.data())
def test_both_ends_of_a_link_want_it(size: int, degree: int, data: st.DataObject) -> None:
    members = [device(i) for i in range(size)]
    dead = set(data.draw(st.lists(st.sampled_from(members), max_size=size - 2, unique=True)))
    links = {own: wanted_links(own, members, dead, degree) for own in members if own not in dead}
    assert all(own in links[other] for own, others in links.items() for other in others)
    assert all(own not in others and not others & dead for own, others in links.items())


def test_the_mean_degree_is_about_what_was_asked_for() -> None:
    members = [device(i) for i in range(200)]
    for degree in (2, 4, 6, 10):
        graph = graph_of(members, set(), degree)
        mean = 2 * graph.number_of_edges() / 200
        assert degree - 0.5 <= mean <= degree, degree
        assert max(dict(graph.degree).values()) <= 4 * degree
    assert nx.diameter(graph_of(members, set(), 6)) <= 7  # a ring alone: 100


def test_a_newcomer_changes_the_links_around_itself_only() -> None:
    members = [device(i) for i in range(60)]
    before, after = (graph_of(group, set(), 6) for group in (members, [*members, device(60)]))
    changed = {frozenset(edge) for edge in before.edges} ^ {frozenset(edge) for edge in after.edges}
    own = {edge for edge in changed if device(60) in edge}
    assert len(changed - own) <= len(own) <= 12


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 20), st.data())
def test_nodes_that_only_learn_from_failed_dials_end_with_the_same_graph(size: int, data: st.DataObject) -> None:
    members = [device(i) for i in range(size)]
    dead = set(data.draw(st.lists(st.sampled_from(members), max_size=size - 1, unique=True)))
    live = [member for member in members if member not in dead]
    known: dict[str, set[str]] = {own: set() for own in live}

    def dials(own: str) -> Iterable[str]:
        return wanted_links(own, members, known[own], 4)

    while any((failed := {own: set(dials(own)) & dead for own in live}).values()):
        for own in live:
            known[own] |= failed[own]
    graph = nx.Graph([(own, other) for own in live for other in dials(own)])
    graph.add_nodes_from(live)
    assert nx.is_connected(graph)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(2, 9), st.data())
def test_kept_links_equal_those_computed_anew(size: int, degree: int, data: st.DataObject) -> None:
    """Members come and go, die and return; one graph follows all of it."""
    own, everybody = device(0), [device(i) for i in range(size)]
    graph = SwarmGraph(own, degree)
    for _ in range(5):
        members = dict.fromkeys({own, *data.draw(st.lists(st.sampled_from(everybody), unique=True))})
        for _ in range(2):
            dead = set(data.draw(st.lists(st.sampled_from(everybody), unique=True))) - {own}
            assert graph.links(members, dead) == defined_links(own, members, dead, degree)
