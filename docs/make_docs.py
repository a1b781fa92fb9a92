"""Rewrite the measured tables and pictures of README.md and docs/ from results/*.json: `make docs`.

A block between `<!-- NAME -->` and `<!-- end NAME -->` belongs to this script. The result files come from
`dfca run PRESET` and `dfca report runs/PRESET --save results/PRESET.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asynchrony_page
import beyond_page
import evidence
import rivals_page
import robustness_page
import torch
from matplotlib.figure import Figure
from writing import table

import dfca
from benchmarks.bench_file import load as load_bench
from benchmarks.figures import draw as draw_bench
from benchmarks.tables import page_blocks as bench_blocks
from dfca.core.learning.local import LocalOptions
from dfca.experiment.load import load_experiment
from dfca.experiment.reference import reference
from dfca.report.drawing.axes import move_apart
from dfca.report.drawing.palette import algorithm_colour, cluster_colour
from dfca.report.rows import RunReport
from dfca.report.statistics import DIVERGED, difference_title, statistics_notes, write_difference
from dfca.report.wording import one_line, percent
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.topology import layout

ROOT = Path(__file__).parent.parent
INK, GREY = "#1f2933", "#9aa5b1"


def quickstart() -> str:
    """Compare the algorithms of the demo on rotated digits, without the extras."""
    run = evidence.result("quickstart")
    assert run is not None
    names = load_experiment("quickstart").config.algorithms
    rows = RunReport.of(replace(run, trials=[trial for trial in run.trials if trial.algorithm in names])).rows
    lines = [
        [
            f"`{row.algorithm}`" + (f" {DIVERGED}" if row.diverged_runs else ""),
            percent(*row.score),
            write_difference(row),
            percent(*row.all_models),
            percent(*row.cluster_accuracy),
            row.found,
        ]
        for row in rows
    ]
    difference = one_line(difference_title(rows))
    head = ["algorithm", "accuracy %", difference, "all models %", "right cluster %", "all clusters found"]
    seeds = max(row.runs for row in rows)
    notes = [f"mean ± standard deviation over {seeds} seeds", *statistics_notes(rows)]
    return table(head, lines) + "\n\n" + "  \n".join(notes)


def draw_bids() -> None:
    """Draw the bids of all candidates of a few elections on digits."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, true in zip(figure.subplots(1, 3, sharey=True), (1, 2, 4), strict=True):
        plot_bids(axes, [elect(true, seed).elections[0].turns[1:] for seed in range(5)])
        axes.set_title(f"true k = {true}", color=INK, fontsize=11)
    figure.axes[0].set_ylabel("bid: regret − standard error")
    figure.suptitle(
        "Filled: opened a cluster. Hollow: refused. 24 clients, rotated digits, a line for each of 5 seeds",
        fontsize=10,
        color=INK,
    )
    figure.savefig(ROOT / "docs" / "bids.png", dpi=130)


def plot_bids(axes: Any, elections: Sequence[Sequence[Any]]) -> None:
    """Draw the bids of a few elections, from their second candidates on: the first is drawn by lot."""
    for turns in elections:
        numbers = range(2, len(turns) + 2)
        axes.plot(numbers, [turn.bid for turn in turns], color=GREY, lw=1, zorder=1)
        for number, turn in zip(numbers, turns, strict=True):
            face = "#0072b2" if turn.accepted else "white"
            axes.scatter(number, turn.bid, s=36, color=face, edgecolors="#0072b2", zorder=2)
    axes.set_xticks(range(2, max(map(len, elections)) + 2))  # a tick under every point, and no others
    axes.set_xlabel("candidate (the first is drawn by lot)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0, color=GREY, lw=0.7)


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
    for algorithm in ("dfca-auto", "dfca-gi", "local"):
        setting = digits_setting(algorithm, 4, 0, None)
        simulation = Simulation(setting)
        rows = [row for row in (simulation.step() for _ in range(40)) if row is not None]
        curves[algorithm] = [row["round"] for row in rows], [100 * row["accuracy"] for row in rows]
        if algorithm == "local":
            continue
        axes = left if algorithm == "dfca-auto" else middle
        place = layout(setting.graph, 0)
        for i, j in setting.graph.edges:
            axes.plot(*zip(place[i], place[j], strict=True), color=GREY, lw=0.6, zorder=1)
        truth = setting.split.clusters.tolist()  # type: ignore[union-attr]
        picks = rows[-1]["assignments"]
        for client, (x, y) in enumerate(place):
            axes.scatter(x, y, s=150, color=cluster_colour(truth[client]), zorder=2)
            axes.annotate(str(picks[client] + 1), (x, y), ha="center", va="center", color="white", fontsize=8, zorder=3)
        axes.set_title(
            f"{algorithm}: {100 * rows[-1]['cluster_accuracy']:.0f} % in their cluster", color=INK, fontsize=11
        )
        axes.axis("off")
    lowest_first = sorted(curves, key=lambda algorithm: curves[algorithm][1][-1])
    apart = move_apart([curves[algorithm][1][-1] / 100 for algorithm in lowest_first], 0.04)
    heights = dict(zip(lowest_first, apart, strict=True))
    for algorithm, (rounds, values) in curves.items():
        height, colour = 100 * heights[algorithm], algorithm_colour(algorithm)
        right.plot(rounds, values, color=colour, lw=2)
        right.annotate(algorithm, (rounds[-1], height), (4, 0), textcoords="offset points", color=colour, va="center")
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


def keys() -> str:
    """List every key of an experiment file."""
    rows = []
    for key in reference():
        cells = [key.kind, key.default or "must be given", key.meaning]
        rows.append([f"`{key.name}`", *(cell.replace("|", "\\|") for cell in cells)])
    return table(["key", "type", "default", "meaning"], rows)


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
    fill(ROOT / "README.md", {"beside": evidence.beside})
    fill(ROOT / "docs" / "start.md", {"quickstart": quickstart})
    fill(ROOT / "docs" / "experiments.md", {"keys": keys})
    fill(ROOT / "docs" / "beyond.md", beyond_page.blocks())
    fill(ROOT / "docs" / "claims.md", {"dates": evidence.dates})
    fill(ROOT / "docs" / "rivals.md", rivals_page.blocks())
    fill(ROOT / "docs" / "robustness.md", {"liars": robustness_page.measured})
    fill(ROOT / "docs" / "results.md", evidence.blocks())
    benchmarks()
    shown = {name: partial(asynchrony_page.measured, name) for name in asynchrony_page.SHOWN}
    fill(ROOT / "docs" / "asynchrony.md", shown | {"verdicts": asynchrony_page.verdicts})


if __name__ == "__main__":
    main()
