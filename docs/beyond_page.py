"""The measured tables of docs/beyond.md, from the results of its presets; `make docs` calls it."""

from __future__ import annotations

from statistics import mean
from typing import Any

from trials import found, load, of
from writing import PAIRED, difference, spread, table


def measured() -> str:
    """Write all tables of the page."""
    return "\n\n".join(make() for make in (beyond_init, beyond_k, beyond_wild, beyond_sparse, drift, never_worse))


def beyond_init() -> str:
    """Count the runs in which all clusters were found."""
    runs = load("beyond-init")
    algorithms = ["dfca-gi", "dfca-li", "ifca", "dfca-fi"]
    rows = []
    for data in ("digits", "mnist"):
        for clients in (12, 24, 60, 120):
            cells = []
            for algorithm in algorithms:
                mine = of(runs, algorithm=algorithm, clients=clients, data__name=data)
                cells.append(
                    f"{sum(map(found, mine))} of {len(mine)} · {spread([r['accuracy'] for r in mine])}" if mine else "–"
                )
            rows.append([data, str(clients), *cells])
    title = "`dfca run beyond-init`: runs in which all clusters were found · accuracy % (50 samples per client, k = 4)"
    elected = of(runs, algorithm="dfca-fi")
    if elected:
        shares = [
            run["start_bytes"] * run["rounds"] / (5 * run["messages_sent"] * run["model_bytes"]) for run in elected
        ]
        title += (
            f"\n\n`dfca-fi` found all clusters in {sum(map(found, elected))} of {len(elected)} runs. Its election sent "
            f"{mean(shares):.2f} times the bytes of 5 rounds of training (mean; at most {max(shares):.2f})."
        )
    return title + "\n\n" + table(["data", "clients", *(f"`{name}`" for name in algorithms)], rows)


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
    """Show how many clusters are found where nobody knows."""
    runs = load("beyond-k-wild")
    rows = []
    for label, keys in (
        ("FEMNIST, one writer per client", {"data__name": "femnist"}),
        ("HAR, one subject per client", {"data__name": "har", "data__transform": "none"}),
        ("HAR, phones turned four ways", {"data__name": "har", "data__distributions": 4}),
    ):
        mine = of(runs, algorithm="dfca-fi", **keys)
        rivals = [of(runs, algorithm=name, **keys) for name in ("dfedavgm", "local")]
        others = [spread([run["accuracy"] for run in each]) for each in rivals]
        others += [difference(mine, each) for each in rivals]
        models = ", ".join(str(run["models"]) for run in mine) or "–"
        rows.append([label, models, spread([run["accuracy"] for run in mine]), *others])
    title = "`dfca run beyond-k-wild`: clusters opened, one number per seed, and accuracy % after 10 rounds. "
    head = ["data", "k found", "`dfca-fi`", "`dfedavgm`", "`local`", "`dfca-fi` − `dfedavgm`", "`dfca-fi` − `local`"]
    return title + PAIRED + "\n\n" + table(head, rows)


def beyond_sparse() -> str:
    """Compare what clients share on sparse graphs."""
    runs = load("beyond-sparse")
    rows = []
    worlds: list[tuple[str, dict[str, Any]]] = [(f"p = {p}", {"topology__p": p}) for p in (0.03, 0.06, 0.1, 0.2, 0.4)]
    worlds += [(name, {"topology__name": name}) for name in ("ring", "torus", "tree")]
    for label, keys in worlds:
        by = {share: of(runs, mixing__share=share, **keys) for share in ("trained", "all", "relay")}
        row = [label]
        for measure in ("accuracy", "all_models_accuracy"):
            row += [spread([run[measure] for run in mine]) for mine in by.values()]
        row += [difference(by["relay"], by["trained"], key) for key in ("accuracy", "all_models_accuracy")]
        row.append(" / ".join(f"{mean(run['bytes_sent'] for run in mine) / 40e6:.1f}" for mine in by.values() if mine))
        row.append(
            " / ".join(
                f"{mean(100 * run['all_models_accuracy'] / (run['bytes_sent'] / 40e6) for run in mine):.0f}"
                for mine in by.values()
                if mine
            )
        )
        rows.append(row)
    title = (
        "`dfca run beyond-sparse`: 40 clients, 4 clusters, elected starts, 5 seeds. Accuracy of the own model and of "
        "all models in %, megabytes sent per client, and points of all-models accuracy per megabyte, for what clients "
        f"share: trained / all / relay. {PAIRED}"
    )
    head = ["graph", "own: trained", "own: all", "own: relay", "all models: trained", "all", "relay"]
    head += ["own: relay − trained", "all models: relay − trained", "MB", "points/MB"]
    return title + "\n\n" + table(head, rows)


def drift() -> str:
    """Show what happens when a third of the clients change."""
    runs = load("drift")
    rows = []
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        mine = of(runs, algorithm=algorithm)
        clusters = [run["cluster_accuracy"] for run in mine if run["cluster_accuracy"] is not None]
        models = ", ".join(sorted({str(run["models"]) for run in mine}))
        accuracies = (spread([run[key] for run in mine]) for key in ("accuracy", "all_models_accuracy"))
        beside = "–" if algorithm == "dfca" else difference(mine, of(runs, algorithm="dfca"))
        first, second = accuracies
        rows.append([f"`{algorithm}`", first, beside, second, spread(clusters), models])
    title = (
        "`dfca run drift`: after half of the rounds a third of the clients changes to a third distribution. At the end "
        f"({PAIRED[0].lower()}{PAIRED[1:-1]}):"
    )
    head = ["algorithm", "accuracy %", "minus `dfca`", "all models %", "right cluster %", "models"]
    return title + "\n\n" + table(head, rows)


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


def never_worse() -> str:
    """Compare dfca with the best of the others in every world; the oracle is a bound."""
    points: dict[str, list[dict[str, Any]]] = {}
    for run in load("never-worse"):
        points.setdefault(repr(run["point"]), []).append(run)
    rows = []
    for world, runs in zip(WORLDS, points.values(), strict=True) if points else ():
        mine = of(runs, algorithm="dfca")
        by = {name: of(runs, algorithm=name) for name in dict.fromkeys(run["algorithm"] for run in runs)}
        bound = by.pop("oracle", [])
        best = max(by.keys() - {"dfca"}, key=lambda name: mean(run["accuracy"] for run in by[name]))
        one = by["dfedavgm"]
        models = ", ".join(str(run["models"]) for run in mine)
        accuracies = [spread([run["accuracy"] for run in each]) for each in (mine, by[best], bound)]
        cells = [world, models, accuracies[0], f"`{best}` {accuracies[1]}", difference(mine, by[best])]
        rows.append([*cells, difference(mine, one), accuracies[2]])
    title = (
        "`dfca run never-worse`: the same momentum and personal last step for everybody; the best of the others is "
        "picked by its mean over these seeds, which favours it. "
    )
    head = ["world", "k found", "`dfca`", "best of the others", "minus it", "minus `dfedavgm`", "`oracle`"]
    return title + PAIRED + "\n\n" + table(head, rows)
