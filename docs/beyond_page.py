"""The measured tables of docs/beyond.md, from the results of its presets; `make docs` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from trials import load, of
from writing import Place, Trials, differences, spread, table

from dfca.report.rows import all_found


def blocks() -> dict[str, Callable[[], str]]:
    """Return the blocks of the page by name."""
    tables = (beyond_init, beyond_k, beyond_wild, beyond_sparse, drift, never_worse, other_data)
    names = ("beyond-init", "beyond-k", "beyond-k-wild", "beyond-sparse", "drift", "never-worse", "other-data")
    return dict(zip(names, tables, strict=True))


def beyond_init() -> str:
    """Count the runs in which all clusters were found."""
    runs = load("beyond-init")
    algorithms = ["dfca-gi", "dfca-li", "ifca", "dfca-fi"]
    rows, asked = [], {}
    columns = {name: f"`dfca-fi` − `{name}`" for name in ("dfca-gi", "ifca")}
    for data in ("digits", "mnist"):
        for clients in (12, 24, 60, 120):
            cells = []
            for algorithm in algorithms:
                mine = of(runs, algorithm=algorithm, clients=clients, data__name=data)
                successes = sum(map(all_found, mine))
                cells.append(f"{successes} of {len(mine)} · {spread([r['accuracy'] for r in mine])}" if mine else "–")
            where = f"{data}, {clients} clients"
            rows.append([where, *cells])
            chosen = {name: of(runs, algorithm=name, clients=clients, data__name=data) for name in algorithms}
            for name, column in columns.items():
                asked[where, column] = chosen["dfca-fi"], chosen[name], "accuracy"
    title = "`dfca run beyond-init`: runs in which all clusters were found · accuracy % (50 samples per client, k = 4)"
    elected = of(runs, algorithm="dfca-fi")
    if elected:
        shares = [
            run["start_bytes"] * run["rounds"] / (5 * run["messages_sent"] * run["model_bytes"]) for run in elected
        ]
        title += (
            f"\n\n`dfca-fi` found all clusters in {sum(map(all_found, elected))} of {len(elected)} runs. Its election "
            f"sent {mean(shares):.2f} times the bytes of 5 rounds of training (mean; at most {max(shares):.2f})."
        )
    head = ["data", *(f"`{name}`" for name in algorithms), *columns.values()]
    return f"{title}\n\n" + _with_differences(head, rows, asked, list(columns.values()))


def beyond_k() -> str:
    """Compare found and true numbers of clusters."""
    runs = load("beyond-k")
    numbers = (1, 2, 3, 4, 6, 8)
    rows = []
    points = [("rotation", samples, {"data__samples_per_client": samples}) for samples in (50, 100, 200)]
    for kind, samples, keys in [*points, ("labels", 50, {"data__samples_per_client": 50})]:
        cells = []
        for true in numbers:
            mine = [
                run
                for run in of(runs, data__distributions=true, **keys)
                if (run["point"].get("data.transform") == "label-permutation") == (kind == "labels")
            ]
            exact = sum(run["models"] == true for run in mine)
            wrong = sorted(run["models"] for run in mine if run["models"] != true)
            cells.append(f"{exact} of {len(mine)}" + (f" ({', '.join(map(str, wrong))})" if wrong else ""))
        rows.append([kind, str(samples), *cells])
    exact = sum(run["models"] == run["point"]["data.distributions"] for run in runs)
    above = sum(run["models"] > run["point"]["data.distributions"] for run in runs)
    title = (
        "`dfca run beyond-k`: MNIST, 60 clients; runs that found exactly the true k (and what the others found). "
        f"Exact in {exact} of {len(runs)} runs, too many in {above}."
    )
    return title + "\n\n" + table(["clusters differ by", "samples", *(f"k = {number}" for number in numbers)], rows)


def beyond_wild() -> str:
    """Show how many clusters are found where the true number is unknown."""
    runs = load("beyond-k-wild")
    rows, asked = [], {}
    columns = {name: f"`dfca-fi` − `{name}`" for name in ("dfedavgm, no momentum", "local")}
    for label, keys in (
        ("FEMNIST, one writer per client", {"data__name": "femnist"}),
        ("HAR, one subject per client", {"data__name": "har", "data__transform": "none"}),
        ("HAR, phones turned four ways", {"data__name": "har", "data__distributions": 4}),
    ):
        mine = of(runs, algorithm="dfca-fi", **keys)
        rivals = {name: of(runs, algorithm=name, **keys) for name in columns}
        others = [spread([run["accuracy"] for run in runs]) for runs in rivals.values()]
        asked |= {(label, columns[name]): (mine, runs, "accuracy") for name, runs in rivals.items()}
        models = ", ".join(str(run["models"]) for run in mine) or "–"
        rows.append([label, models, spread([run["accuracy"] for run in mine]), *others])
    title = "`dfca run beyond-k-wild`: clusters opened, one number per seed, and accuracy % after 10 rounds."
    head = ["data", "k found", "`dfca-fi`", *(f"`{name}`" for name in columns), *columns.values()]
    return title + "\n\n" + _with_differences(head, rows, asked, list(columns.values()))


def beyond_sparse() -> str:
    """Compare what clients share on sparse graphs."""
    runs = load("beyond-sparse")
    rows, asked = [], {}
    columns = {"accuracy": "own: relay − trained", "all_models_accuracy": "all models: relay − trained"}
    worlds: list[tuple[str, dict[str, Any]]] = [(f"p = {p}", {"topology__p": p}) for p in (0.03, 0.06, 0.1, 0.2, 0.4)]
    worlds += [(name, {"topology__name": name}) for name in ("ring", "torus", "tree")]
    for label, keys in worlds:
        by = {share: of(runs, mixing__share=share, **keys) for share in ("trained", "all", "relay")}
        row = [label]
        for measure in columns:
            row += [spread([run[measure] for run in mine]) for mine in by.values()]
        asked |= {(label, title): (by["relay"], by["trained"], key) for key, title in columns.items()}
        row.append(" / ".join(f"{mean(run['bytes_sent'] for run in mine) / 40e6:.1f}" for mine in by.values() if mine))
        rows.append(row)
    title = (
        "`dfca run beyond-sparse`: 40 clients, 4 clusters, elected starts, 5 seeds. Accuracy of the own model and of "
        "all models in % and megabytes sent per client, for what clients share: trained / all / relay."
    )
    head = ["graph", "own: trained", "own: all", "own: relay", "all models: trained", "all", "relay"]
    head += ["MB", *columns.values()]
    return title + "\n\n" + _with_differences(head, rows, asked, list(columns.values()))


def drift() -> str:
    """Show what happens when a third of the clients change."""
    runs = load("drift")
    rows, asked = [], {}
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        mine = of(runs, algorithm=algorithm)
        clusters = [run["cluster_accuracy"] for run in mine if run["cluster_accuracy"] is not None]
        models = ", ".join(sorted({str(run["models"]) for run in mine}))
        accuracies = (spread([run[key] for run in mine]) for key in ("accuracy", "all_models_accuracy"))
        if algorithm != "dfca-auto":
            asked[f"`{algorithm}`", "minus `dfca-auto`"] = mine, of(runs, algorithm="dfca-auto"), "accuracy"
        rows.append([f"`{algorithm}`", *accuracies, spread(clusters), models])
    title = (
        "`dfca run drift`: after half of the rounds a third of the clients changes to a third distribution. At the end:"
    )
    head = ["algorithm", "accuracy %", "all models %", "right cluster %", "models", "minus `dfca-auto`"]
    return title + "\n\n" + _with_differences(head, rows, asked, ["minus `dfca-auto`"])


WORLDS = (
    "4 rotations, 60 samples",
    "4 rotations, 30 samples",
    "2 rotations, 15 samples",
    "3 rotations, 12 : 8 : 4 clients",
    "a pair of labels swapped for half",
    "noise in 4 grades",
    "blur in 4 grades",
    "iid, 30 samples",
    "iid, 200 samples",
    "Dirichlet(1)",
    "Dirichlet(0.2)",
    "4 rotations and Dirichlet(1)",
    "4 rotations and Dirichlet(0.3)",
    "HAR, one person per client",
    "FEMNIST, one writer per client",
)
"""The worlds of the preset never-worse, in its order."""


OTHER_WORLDS = (
    "EMNIST, 4 rotations",
    "EMNIST, iid",
    "EMNIST, Dirichlet(0.3)",
    "EMNIST, a pair of labels swapped for half",
    "CIFAR-10, 2 rotations",
    "CIFAR-10, Dirichlet(0.3)",
    "digits, 4 rotations",
    "digits, iid",
    "digits, a pair of labels swapped for half",
)
"""The worlds of the preset other-data, in its order."""


def never_worse() -> str:
    """Compare dfca-auto with the best of the others in every world; the oracle is a bound."""
    title = (
        "`dfca run never-worse`: the same momentum and personal last step for everybody; the best of the others is "
        "picked by its mean over these seeds, which favours it."
    )
    return title + "\n\n" + _against_the_best("never-worse", WORLDS)


def other_data() -> str:
    """Compare dfca-auto with the best of the others on other data."""
    title = (
        "`dfca run other-data`: the same on EMNIST (100 samples per client), CIFAR-10 (100) and digits (40), against "
        "`dfedavgm`, `ifca`, which is told k, and `local`:"
    )
    return title + "\n\n" + _against_the_best("other-data", OTHER_WORLDS)


def _against_the_best(preset: str, worlds: Sequence[str]) -> str:
    points: dict[str, list[dict[str, Any]]] = {}
    for run in load(preset):
        points.setdefault(repr(run["point"]), []).append(run)
    rows, asked, bounded = [], {}, any(run["algorithm"] == "oracle" for runs in points.values() for run in runs)
    for world, runs in zip(worlds, points.values(), strict=True) if points else ():
        by = {name: of(runs, algorithm=name) for name in dict.fromkeys(run["algorithm"] for run in runs)}
        mine, bound, one = by.pop("dfca-auto"), by.pop("oracle", []), by["dfedavgm"]
        best = max(by, key=lambda name: mean(run["accuracy"] for run in by[name]))  # the first of those that are level
        models = ", ".join(str(run["models"]) for run in mine)
        accuracies = [spread([run["accuracy"] for run in runs]) for runs in (mine, by[best], bound)]
        rows.append([world, models, accuracies[0], f"`{best}` {accuracies[1]}", *accuracies[2:][:bounded]])
        asked[world, "minus the best"] = mine, by[best], "accuracy"
        asked[world, "minus `dfedavgm`"] = mine, one, "accuracy"
    columns = ["minus the best", "minus `dfedavgm`"]
    head = ["world", "k found", "`dfca-auto`", "best of the others", *["`oracle`"][:bounded], *columns]
    return _with_differences(head, rows, asked, columns)


def _with_differences(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    asked: Mapping[Place, tuple[Trials, Trials, str]],
    columns: Sequence[str],
) -> str:
    """Write a table whose last columns are differences, and the line that says how to read them."""
    cells, line = differences(asked)
    lines = [[*row, *(cells.get((row[0], column), "–") for column in columns)] for row in rows]
    return table(head, lines) + "\n\n" + line
