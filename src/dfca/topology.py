"""Which clients are neighbours: the graphs of clients, on networkx.

    options -> make_graph -> nx.Graph with nodes 0..N-1, undirected, no self loops: the links
                   |
                   +-> receivers_of, directed_edges -> which of them carry models, which way, in which rounds
                   +-> describe -> facts (JSON-able) -> summary (one line)
                   +-> layout   -> where to draw each client

A graph may be disconnected and a client may have no neighbour: the equations of every algorithm cover it, and
`describe` counts it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import networkx as nx
import numpy as np

from dfca.base.errors import ConfigError
from dfca.base.imports import call_own, import_function, is_import
from dfca.core.rng import derive
from dfca.topology_options import TOPOLOGIES as TOPOLOGIES
from dfca.topology_options import USES as USES
from dfca.topology_options import TopologyOptions as TopologyOptions
from dfca.topology_options import check_topology as check_topology
from dfca.topology_options import grid_rows

DENSE_LIMIT = 1500  # up to here all eigenvalues by LAPACK take about a second; beyond, Lanczos


def make_graph(options: TopologyOptions, clients: int, seed: int) -> nx.Graph:
    """Make the graph of clients 0..N-1; the same arguments give the same graph.

    Args:
        options: Which topology, and its parameters.
        clients: N. A single client has no neighbours.
        seed: Determines random topologies.

    Returns:
        An undirected graph without self loops. It may be disconnected.

    Raises:
        ConfigError: If the name is unknown, a value is out of its bounds, or a file is missing or malformed.

    Example:
        >>> import dfca
        >>> graph = dfca.make_graph(dfca.TopologyOptions(name="ring"), clients=5, seed=0)
        >>> sorted(graph.neighbors(0))
        [1, 4]
    """
    check_topology(options, clients)
    if is_import(options.name):
        return _own_graph(options.name, clients, seed)
    if options.name == "file":
        made: nx.Graph = nx.DiGraph() if options.directed else nx.Graph()
        made.add_edges_from(_read_edges(Path(options.file or ""), clients))
        return join_graphs([made], clients)
    if clients == 1:
        return join_graphs([nx.Graph()], 1)
    names = [(), *((number,) for number in range(1, options.graphs))]
    drawn = [_GENERATORS[options.name](options, clients, derive(seed, "topology", *name)) for name in names]
    return join_graphs(drawn, clients)


def join_graphs(graphs: Sequence[nx.Graph], clients: int) -> nx.Graph:
    """Make one graph of several that are used in turn, round by round; directed ones carry models along their edges.

    Args:
        graphs: One or more graphs over 0..N-1, directed or not; round t uses the one at t mod their number.
        clients: N.

    Returns:
        All links, undirected. Where a graph is directed, or there are several, its attribute "receivers" says by graph
        and client to whom models are sent.

    Example:
        >>> import networkx as nx
        >>> graph = join_graphs([nx.DiGraph([(0, 1), (1, 2), (2, 0)])], clients=3)
        >>> sorted(graph.neighbors(0)), receivers_of(graph, 0)
        ([1, 2], ((1,),))
    """
    links = nx.Graph()
    links.add_nodes_from(range(clients))
    links.add_edges_from(sorted({(min(i, j), max(i, j)) for graph in graphs for i, j in graph.edges if i != j}))
    if len(graphs) > 1 or graphs[0].is_directed():
        links.graph["receivers"] = tuple(
            tuple(tuple(sorted({*graph.adj.get(i, ())} - {i})) for i in range(clients)) for graph in graphs
        )
    return links


def receivers_of(graph: nx.Graph, client: int) -> tuple[tuple[int, ...], ...]:
    """List to whom a client sends its models, by graph of those used in turn; (): to all neighbours in every round."""
    return tuple(phase[client] for phase in graph.graph.get("receivers", ()))


def directed_edges(graph: nx.Graph) -> list[Any]:
    """List the ways that models travel, by graph of those used in turn: (2, E) int64, (receiver, sender) in order."""
    import torch  # late: `dfca list` reads this module

    ways = [
        sorted((j, i) for i, receivers in enumerate(phase) for j in receivers)
        for phase in graph.graph.get("receivers", [[graph.adj[i] for i in range(len(graph))]])
    ]
    return [torch.tensor(way, dtype=torch.int64).reshape(-1, 2).T for way in ways]


def is_one_way(graph: nx.Graph) -> bool:
    """Return whether a link carries models one way only in some round."""
    phases = graph.graph.get("receivers", ())
    return any(i not in phase[j] for phase in phases for i, receivers in enumerate(phase) for j in receivers)


def check_graph(graph: nx.Graph, clients: int, what: str = "the graph") -> None:
    """Refuse other nodes than the clients 0..N-1, double edges, and loops. Raises ConfigError."""
    numbers = f"0..{clients - 1}"
    strange = [node for node in graph if type(node) is bool or not isinstance(node, int | np.integer)]
    if strange:
        raise ConfigError(
            f"{what} must have the nodes {numbers}, one per client, as integers, got the node {strange[0]!r}; number "
            "them by nx.convert_node_labels_to_integers(graph)"
        )
    if sorted(graph.nodes) != list(range(clients)):
        wrong = sorted(set(graph.nodes) ^ set(range(clients)))[0]
        state = "has the node" if wrong in graph else "lacks the node"
        raise ConfigError(
            f"{what} must have the nodes {numbers}, one per client; it has {len(graph)} nodes, and {state} {wrong}"
        )
    if graph.is_multigraph() or nx.number_of_selfloops(graph):
        raise ConfigError(
            f"{what} must be without loops and double edges; convert it by nx.Graph(graph), and remove "
            "loops by graph.remove_edges_from(nx.selfloop_edges(graph))"
        )


def check_graphs(made: Any, clients: int, what: str = "the graph") -> nx.Graph:
    """Join a graph, or a list of graphs that are used in turn, after `check_graph`. Raises ConfigError."""
    if isinstance(made, nx.Graph) and not made.is_directed():
        check_graph(made, clients, what)
        return made
    graphs = [made] if isinstance(made, nx.Graph) else list(made)
    for graph in graphs:
        check_graph(graph, clients, what)
    return join_graphs(graphs, clients)


def is_graphs(made: Any) -> bool:
    """Return whether something is a graph, or a list of graphs."""
    return isinstance(made, nx.Graph) or (
        isinstance(made, list | tuple) and bool(made) and all(isinstance(graph, nx.Graph) for graph in made)
    )


def _own_graph(name: str, clients: int, seed: int) -> nx.Graph:
    made = call_own(import_function(name, "topology.name"), clients, seed, f'topology "{name}"')
    if not is_graphs(made):
        graph = nx.Graph()
        graph.add_nodes_from(range(clients))
        try:
            graph.add_edges_from((i, j) for i, j in made)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'topology "{name}" must return a networkx graph or a list of edges (i, j), got {type(made).__name__}'
            ) from error
        made = graph
    joined = check_graphs(made, clients, f'the graph of topology "{name}"')
    return joined if "receivers" in joined.graph else join_graphs([joined], clients)


def describe(graph: nx.Graph, clusters: Sequence[int] | Any | None = None) -> dict[str, Any]:
    """Measure a graph, and how the clusters lie on it; every value can be written as JSON.

    `clusters` holds the cluster of each client, `(N,)`; without it `pairs_without_trainer` and `pairs` are None.
    """
    degrees = [degree for _, degree in graph.degree]
    nodes = graph.number_of_nodes()
    facts: dict[str, Any] = {
        "nodes": nodes,
        "edges": graph.number_of_edges(),
        "components": nx.number_connected_components(graph),
        "isolated": degrees.count(0),
        "degree_min": min(degrees),
        "degree_max": max(degrees),
        "degree_mean": sum(degrees) / nodes,
        "spectral_gap": spectral_gap(graph),
        "pairs_without_trainer": None,
        "pairs": None,
    }
    if clusters is not None:
        k = int(np.max(np.asarray(clusters))) + 1
        facts["pairs_without_trainer"] = pairs_without_trainer(graph, clusters, k)
        facts["pairs"] = nodes * k
    if phases := graph.graph.get("receivers"):
        facts["graphs"], facts["one_way"] = len(phases), is_one_way(graph)
    return facts


def summary(facts: dict[str, Any]) -> str:
    """Write the facts of `describe` in one line."""
    low, high = facts["degree_min"], facts["degree_max"]
    degree = f"{low}" if low == high else f"{low}–{high} (mean {facts['degree_mean']:.1f})"
    connected = "connected" if facts["components"] == 1 else f"{facts['components']:,} components"
    parts = [_count(facts["nodes"], "client"), _count(facts["edges"], "edge"), connected]
    if facts["isolated"] and facts["nodes"] > 1:
        parts.append(f"{_count(facts['isolated'], 'client')} without neighbours")
    parts += [f"degree {degree}", f"spectral gap {_short(facts['spectral_gap'])}"]
    if facts.get("graphs", 1) > 1:
        parts.append(f"{facts['graphs']} graphs in turn")
    if facts.get("one_way"):
        parts.append("models travel one way")
    line = ", ".join(parts)
    missing, pairs = facts.get("pairs_without_trainer"), facts.get("pairs")
    if missing is None:
        return line
    if missing == 0:
        return f"{line}; every client has a neighbour in every cluster"
    verb = "has" if missing == 1 else "have"
    return f"{line}; {missing:,} of {pairs:,} (client, cluster) pairs {verb} no neighbour in that cluster"


def pairs_without_trainer(graph: nx.Graph, clusters: Sequence[int] | Any, k: int) -> int:
    """Count the (client, cluster) pairs (i, j) where no neighbour of client i is of cluster j, its own included."""
    of = np.asarray(clusters, dtype=np.int64)
    nodes = graph.number_of_nodes()
    if of.shape != (nodes,):
        raise ConfigError(f"clusters must hold one cluster for each of the {nodes} clients, got shape {of.shape}")
    reached = np.zeros((nodes, k), dtype=bool)
    for i, j in graph.edges:
        reached[i, of[j]] = reached[j, of[i]] = True
    return int((~reached).sum())


def spectral_gap(graph: nx.Graph) -> float:
    """Compute 1 - max(|λ2|, |λN|) of the Metropolis matrix W, w_ij = 1 / (1 + max(d_i, d_j)).

    The disagreement under gossip with W shrinks at least by the factor 1 - gap per round: 1 is agreement in one
    round, 0 is never (a graph that is not connected).
    """
    n = graph.number_of_nodes()
    if n == 1 or graph.number_of_edges() == n * (n - 1) // 2:
        return 1.0  # W = J / N
    if not nx.is_connected(graph):
        return 0.0
    w = _metropolis(graph)
    if n <= DENSE_LIMIT:
        eigenvalues = np.linalg.eigvalsh(w.toarray())
        largest = max(abs(eigenvalues[0]), abs(eigenvalues[-2]))
    else:
        largest = _largest_beside_one(w)
    return float(min(1.0, max(0.0, 1.0 - largest)))


def layout(graph: nx.Graph, seed: int, name: str = "") -> np.ndarray:
    """Place the clients for drawing, (N, 2) in -1..1: in the shape of that topology if it has one, or by springs."""
    n = graph.number_of_nodes()
    if n == 1:
        return np.zeros((1, 2))
    if name in ("ring", "small-world", "complete") or _is_ring(graph):
        return _circle(n)
    if name == "star":
        return np.vstack([np.zeros((1, 2)), _circle(n - 1)])
    if name == "tree":
        return _radial_tree(n)
    if name == "torus":
        return _grid(n)
    return _springs(graph, seed)


_GENERATORS: dict[str, Callable[[TopologyOptions, int, int], nx.Graph]] = {
    "erdos-renyi": lambda o, n, seed: nx.fast_gnp_random_graph(n, o.p, seed=seed),
    "ring": lambda o, n, seed: nx.cycle_graph(n),
    "torus": lambda o, n, seed: nx.convert_node_labels_to_integers(
        nx.grid_2d_graph(grid_rows(n), n // grid_rows(n), periodic=True)
    ),
    "regular": lambda o, n, seed: nx.random_regular_graph(o.degree, n, seed=seed),
    "small-world": lambda o, n, seed: nx.watts_strogatz_graph(n, o.degree, o.rewire, seed=seed),
    "scale-free": lambda o, n, seed: nx.barabasi_albert_graph(n, o.attach, seed=seed),
    "random-geometric": lambda o, n, seed: nx.random_geometric_graph(n, o.radius, seed=seed),
    "star": lambda o, n, seed: nx.star_graph(n - 1),
    "complete": lambda o, n, seed: nx.complete_graph(n),
    "tree": lambda o, n, seed: nx.full_rary_tree(2, n),
    "directed": lambda o, n, seed: nx.DiGraph(_random_receivers(o.degree, n, seed)),
}


def _random_receivers(degree: int, n: int, seed: int) -> list[tuple[int, int]]:
    """Draw `degree` others for every client to send to."""
    rng = np.random.default_rng(seed)
    return [(i, int(j) + (int(j) >= i)) for i in range(n) for j in rng.choice(n - 1, degree, replace=False)]


def _read_edges(path: Path, clients: int) -> list[tuple[int, int]]:
    """Read the edges of a .graphml file or, by any other name, of an edge list."""
    try:
        if path.suffix.lower() == ".graphml":
            return _read_graphml(path, clients)
        return _read_edge_list(path, clients)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f'topology.file "{path}" cannot be read: {reason}; give the path of a file') from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f'topology.file "{path}" is not a text file; give an edge list (two client numbers per line) or .graphml'
        ) from error


def _read_edge_list(path: Path, clients: int) -> list[tuple[int, int]]:
    edges = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        text = re.sub(r"\s*\{.*\}\s*$", "", line.split("#")[0])  # networkx writes `0 1 {}`
        fields = text.split()
        if not fields:
            continue
        where = f'topology.file "{path}", line {number}'
        if len(fields) != 2 or not all(field.isdecimal() for field in fields):
            raise ConfigError(f'{where}: expected two client numbers such as "0 1", got "{line.strip()}"')
        i, j = (_in_range(int(field), clients, where) for field in fields)
        edges.append((i, j))
    return edges


def _read_graphml(path: Path, clients: int) -> list[tuple[int, int]]:
    where = f'topology.file "{path}"'
    try:
        graph = nx.read_graphml(path)
    except (ParseError, nx.NetworkXError, KeyError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise ConfigError(f"{where} is not valid GraphML: {error}; write it again or use an edge list") from error
    ids = {}
    for node in graph:
        match = re.fullmatch(r"n?(\d+)", node)  # networkx writes 0, igraph and yEd write n0
        if match is None:
            raise ConfigError(f'{where}: node "{node}" is not a client number; number the nodes 0..{clients - 1}')
        ids[node] = _in_range(int(match[1]), clients, where)
    return [(ids[i], ids[j]) for i, j in graph.edges()]


def _in_range(client: int, clients: int, where: str) -> int:
    if not client < clients:
        raise ConfigError(
            f"{where}: client {client} is out of 0..{clients - 1}; "
            f"client numbers start at 0: renumber them, or set clients = {client + 1}"
        )
    return client


def _metropolis(graph: nx.Graph) -> Any:
    """Build the Metropolis matrix as a sparse array, (N, N): symmetric and doubly stochastic."""
    from scipy import sparse  # late: `dfca list` reads this module, and graphs of a few clients need none of it

    n = graph.number_of_nodes()
    i, j = np.array(graph.edges, dtype=np.int64).T
    degree = np.bincount(np.concatenate([i, j]), minlength=n)
    weight = 1.0 / (1.0 + np.maximum(degree[i], degree[j]))
    off = sparse.coo_array((weight, (i, j)), shape=(n, n)).tocsr()
    off = off + off.T
    return off + sparse.diags_array(1.0 - off.sum(axis=1))


def _largest_beside_one(w: Any) -> float:
    """Find max(|λ2|, |λN|) of a large W: the largest |eigenvalue| of W - J / N, from a fixed start."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # late, as above

    n = w.shape[0]
    deflated = LinearOperator((n, n), matvec=lambda v: w @ v - v.mean(), dtype=np.float64)
    v0 = np.random.default_rng(0).standard_normal(n)
    try:
        largest = eigsh(deflated, k=1, which="LM", v0=v0, ncv=min(n - 1, 80), tol=1e-9, return_eigenvectors=False)
    except ArpackNoConvergence:
        return 1.0  # eigenvalues too close to 1 to be distinguished: the gap is 0 to every digit shown
    return float(abs(largest[0]))


def _is_ring(graph: nx.Graph) -> bool:
    n = graph.number_of_nodes()
    return n > 2 and graph.number_of_edges() == n and all(graph.has_edge(i, (i + 1) % n) for i in range(n))


def _circle(n: int) -> np.ndarray:
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    return np.column_stack([np.cos(angle), np.sin(angle)])


def _grid(n: int) -> np.ndarray:
    rows = grid_rows(n)
    columns = n // rows
    row, column = np.divmod(np.arange(n), columns)
    scale = max(columns - 1, 1) / 2
    return np.asarray(np.column_stack([column - (columns - 1) / 2, (rows - 1) / 2 - row]) / scale)


def _radial_tree(n: int) -> np.ndarray:
    """Place node i of a binary heap at its depth's circle, over the middle of its leaves."""
    heap = np.arange(1, n + 1)
    depth = np.floor(np.log2(heap)).astype(int)
    turn = (heap - 2.0**depth + 0.5) / 2.0**depth
    radius = depth / max(int(depth.max()), 1)
    angle = np.pi / 2 - 2 * np.pi * turn
    return np.asarray(radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)]))


def _springs(graph: nx.Graph, seed: int, iterations: int = 80) -> np.ndarray:
    """Place by springs (Fruchterman-Reingold): links pull by d^2 / s, all pairs push by s^2 / d, a cooling step.

    A weak pull to the middle keeps the parts of a disconnected graph together. Dense in numpy: one second for 1,000
    clients where `nx.spring_layout` takes six.
    """
    n = graph.number_of_nodes()
    linked = nx.to_numpy_array(graph, nodelist=range(n), weight=None)
    x = np.random.default_rng(derive(seed, "layout")).uniform(-1, 1, (n, 2))
    s = 2 / math.sqrt(n)
    for step in np.linspace(0.2, 0.005, iterations):
        square = (x**2).sum(1)
        distance = np.sqrt(np.maximum(square[:, None] + square[None, :] - 2 * x @ x.T, 1e-6))
        push = (s / distance) ** 2 - linked * distance / s
        np.fill_diagonal(push, 0)
        force = push.sum(1)[:, None] * x - push @ x - x
        x = x + force * (step / np.maximum(np.linalg.norm(force, axis=1, keepdims=True), 1e-9))
    x = x - x.mean(0)
    return np.asarray(x / np.abs(x).max())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(value: float) -> str:
    """Write two digits that matter: 0.42, 0.0013; 0 stays 0."""
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"
