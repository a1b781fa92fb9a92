"""Rewrite the measured tables and pictures of README.md and docs/ from results/*.json: `make docs`.

A block between `<!-- NAME -->` and `<!-- end NAME -->` belongs to this script. The result files come from
`dfca run PRESET` and `dfca report runs/PRESET --save results/PRESET.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import asynchrony_page
import evidence
import torch
from matplotlib.figure import Figure

import dfca
from dfca.bench.figures import draw as draw_bench
from dfca.bench.page import blocks as bench_blocks
from dfca.bench.record import load as load_bench
from dfca.core.local import LocalOptions
from dfca.experiment.plots import colour_of
from dfca.sim.rounds import Simulation
from dfca.sim.setting import Setting
from dfca.topology import layout

ROOT = Path(__file__).parent.parent
INK, GREY = "#1f2933", "#9aa5b1"
Runs = list[dict[str, Any]]


def load(name: str) -> Runs:
    """Read the finished cells of a result file, each with its point; none where there is no such file."""
    path = ROOT / "results" / f"{name}.json"
    if not path.exists():
        return []
    return [run for run in json.loads(path.read_text())["runs"] if run.get("finished")]


def spread(values: Sequence[float], scale: float = 100, digits: int = 1) -> str:
    """Write mean ± standard deviation."""
    if not values:
        return "–"
    deviation = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{deviation}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def found(run: dict[str, Any]) -> bool:
    """Tell whether every client ended in its cluster."""
    return run["cluster_accuracy"] is not None and run["cluster_accuracy"] >= 0.999


def of(runs: Runs, **wanted: Any) -> Runs:
    """Select cells by algorithm and by keys of their point (dots as double underscores)."""
    algorithm = wanted.pop("algorithm", None)
    keys = {key.replace("__", "."): value for key, value in wanted.items()}
    return [
        run
        for run in runs
        if (algorithm is None or run["algorithm"] == algorithm)
        and all(run.get("point", {}).get(key) == value for key, value in keys.items())
    ]


def quickstart() -> str:
    """Compare all algorithms on rotated digits."""
    runs = load("quickstart")
    rows = []
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        mine = of(runs, algorithm=algorithm)
        clustered = mine[0]["cluster_accuracy"] is not None
        rows.append(
            [
                f"`{algorithm}`",
                spread([run["accuracy"] for run in mine]),
                spread([run["all_models_accuracy"] for run in mine]),
                spread([run["cluster_accuracy"] for run in mine]) if clustered else "–",
                f"{sum(map(found, mine))} of {len(mine)}" if clustered else "–",
            ]
        )
    head = ["algorithm", "accuracy %", "all models %", "right cluster %", "all clusters found"]
    return table(head, rows)


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
    """Say how many clusters are found where nobody knows."""
    runs = load("beyond-k-wild")
    rows = []
    for label, keys in (
        ("FEMNIST, one writer per client", {"data__name": "femnist"}),
        ("HAR, one subject per client", {"data__name": "har", "data__transform": "none"}),
        ("HAR, phones turned four ways", {"data__name": "har", "data__distributions": 4}),
    ):
        mine = of(runs, algorithm="dfca-fi", **keys)
        others = [spread([r["accuracy"] for r in of(runs, algorithm=a, **keys)]) for a in ("dfedavgm", "local")]
        models = ", ".join(str(run["models"]) for run in mine) or "–"
        rows.append([label, models, spread([run["accuracy"] for run in mine]), *others])
    title = "`dfca run beyond-k-wild`: clusters opened, one number per seed, and accuracy % after 10 rounds"
    return title + "\n\n" + table(["data", "k found", "`dfca-fi`", "`dfedavgm`", "`local`"], rows)


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
        "share: trained / all / relay"
    )
    head = ["graph", "own: trained", "own: all", "own: relay", "all models: trained", "all", "relay", "MB", "points/MB"]
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
        rows.append([f"`{algorithm}`", *accuracies, spread(clusters), models])
    title = (
        "`dfca run drift`: after half of the rounds a third of the clients changes to a third distribution; at the end:"
    )
    return title + "\n\n" + table(["algorithm", "accuracy %", "all models %", "right cluster %", "models"], rows)


def draw_bids() -> None:
    """Draw the bids of all candidates of a few elections on digits."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, true in zip(figure.subplots(1, 3, sharey=True), (1, 2, 4), strict=True):
        for seed in range(5):
            turns = elect(true, seed).elections[0].turns[1:]
            bids = [turn.bid for turn in turns]
            axes.plot(range(2, len(bids) + 2), bids, color=GREY, lw=1, zorder=1)
            for number, turn in enumerate(turns, start=2):
                face = "#0072b2" if turn.accepted else "white"
                axes.scatter(number, turn.bid, s=36, color=face, edgecolors="#0072b2", zorder=2)
        axes.set_title(f"true k = {true}", color=INK, fontsize=11)
        axes.set_xlabel("candidate number")
        axes.set_xticks(range(2, 8))
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(0, color=GREY, lw=0.7)
    figure.axes[0].set_ylabel("bid: regret − standard error")
    figure.suptitle(
        "Filled: opened a cluster. Hollow: refused. 24 clients, rotated digits, 5 seeds", fontsize=10, color=INK
    )
    figure.savefig(ROOT / "docs" / "bids.png", dpi=130)


def elect(true: int, seed: int) -> Simulation:
    """Hold an election on rotated digits."""
    return Simulation(digits_setting("dfca-fi", true, seed, clusters=None))


def digits_setting(algorithm: str, true: int, seed: int, clusters: int | None) -> Setting:
    """Make the world of the quickstart."""
    split = dfca.make_split(dfca.DataOptions(samples_per_client=59), clients=24, clusters=true, seed=seed)
    return Setting(
        split=split,
        graph=dfca.make_graph(dfca.TopologyOptions(p=0.3), 24, seed),
        make_model=lambda: dfca.mlp((1, 8, 8), 10, 64),
        algorithm=dfca.ALGORITHMS[algorithm](),
        clusters=clusters,
        rounds=40,
        seed=seed,
        local=LocalOptions(learning_rate=0.5),
        evaluate_every=2,
    )


def draw_quickstart() -> None:
    """Draw a graph with what two algorithms found, and their accuracy by round."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for algorithm in ("dfca", "dfca-gi", "local"):
        setting = digits_setting(algorithm, 4, 0, None)
        simulation = Simulation(setting)
        rows = [row for row in (simulation.step() for _ in range(40)) if row is not None]
        curves[algorithm] = [row["round"] for row in rows], [100 * row["accuracy"] for row in rows]
        if algorithm == "local":
            continue
        axes = left if algorithm == "dfca" else middle
        place = layout(setting.graph, 0)
        for i, j in setting.graph.edges:
            axes.plot(*zip(place[i], place[j], strict=True), color=GREY, lw=0.6, zorder=1)
        truth = setting.split.clusters.tolist()  # type: ignore[union-attr]
        picks = rows[-1]["assignments"]
        for client, (x, y) in enumerate(place):
            axes.scatter(x, y, s=150, color=colour_of(truth[client]), zorder=2)
            axes.annotate(str(picks[client] + 1), (x, y), ha="center", va="center", color="white", fontsize=8, zorder=3)
        axes.set_title(
            f"{algorithm}: {100 * rows[-1]['cluster_accuracy']:.0f} % in their cluster", color=INK, fontsize=11
        )
        axes.axis("off")
    for (algorithm, (rounds, values)), colour in zip(curves.items(), ("#0072b2", "#d55e00", GREY), strict=True):
        right.plot(rounds, values, color=colour, lw=2)
        right.annotate(
            algorithm, (rounds[-1], values[-1]), (4, 0), textcoords="offset points", color=colour, va="center"
        )
    right.set_xlabel("round")
    right.set_ylabel("accuracy on own test data, %")
    right.set_xlim(0, 47)
    right.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("colour: true cluster of a client; number: the model that it trains", fontsize=9, color=INK, x=0.3)
    figure.savefig(ROOT / "docs" / "quickstart.png", dpi=120)


def benchmarks() -> None:
    """Fill the page of the bench and draw its pictures."""
    content = load_bench(ROOT / "results" / "bench.json")
    draw_bench(content, ROOT / "docs")
    fill(
        ROOT / "docs" / "benchmarks.md", {name: lambda text=text: text for name, text in bench_blocks(content).items()}
    )


def fill(path: Path, blocks: dict[str, Callable[[], str]]) -> None:
    """Replace the marked blocks of a page."""
    text = path.read_text()
    for name, make in blocks.items():
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{path.name} has no block <!-- {name} --> ... <!-- end {name} -->")
        block = f"<!-- {name} -->\n{make()}\n<!-- end {name} -->"
        text = pattern.sub(lambda _, block=block: block, text)
    path.write_text(text)


def main() -> None:
    torch.set_num_threads(1)
    draw_quickstart()
    draw_bids()
    fill(ROOT / "README.md", {"quickstart": quickstart, "beside": partial(evidence.beside, "table1-mnist")})
    measured = [beyond_init, beyond_k, beyond_wild, beyond_sparse, drift]
    fill(ROOT / "docs" / "beyond.md", {"measured": lambda: "\n\n".join(make() for make in measured)})
    fill(ROOT / "docs" / "results.md", evidence.blocks())
    benchmarks()
    shown = {name: partial(asynchrony_page.measured, name) for name in asynchrony_page.SHOWN}
    fill(ROOT / "docs" / "asynchrony.md", shown | {"verdicts": asynchrony_page.verdicts})


if __name__ == "__main__":
    main()
