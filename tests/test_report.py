"""Tables and the page of a run, on run folders that the tests write themselves."""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from dfca.errors import RunError
from dfca.report import formats, plots, tables
from dfca.report import page as report
from dfca.report.page import curve_of, curves_of, write_report
from dfca.report.paper.scenes import match_clusters
from dfca.report.results import load_results, save_results
from dfca.runs.reading import load_run
from dfca.topology import TopologyOptions, describe, make_graph

LEVELS = {  # final accuracy, final share of clients in the right cluster, models kept, share of the graph's messages
    "dfca-gi": (0.937, 1.0, "k", 1),
    "dfca-li": (0.921, 0.97, "k", 1),
    "ifca": (0.941, 1.0, "k", 0.1),
    "fedspd": (0.872, 0.8, "k", 1),
    "dfedavgm": (0.684, None, "one", 1),
    "fedavg": (0.702, None, "one", 0.1),
    "local": (0.795, None, "one", 0),
    "oracle": (0.952, 1.0, "k", 0.1),
}


def write_run(
    folder: Path,
    algorithms: tuple[str, ...] = tuple(LEVELS),
    clients: int = 24,
    clusters: int = 4,
    seeds: int = 3,
    rounds: int = 40,
    every: int = 5,
    topology: TopologyOptions | None = None,
    true_clusters: bool = True,
    unfinished: tuple[tuple[str, int], ...] = (),
) -> Path:
    """Write a run folder with plausible numbers; cells named in `unfinished` stop half way."""
    topology = topology or TopologyOptions(p=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "title": "Every algorithm on rotated digits",
        "description": "Digits, a quarter of the `<24>` clients each turned by 0, 90, 180 and 270 degrees.",
        "clients": clients,
        "clusters": clusters,
        "rounds": rounds,
        "participation": 1.0,
        "algorithms": list(algorithms),
        "seeds": list(range(seeds)),
        "data": {"name": "digits", "partition": "rotated", "samples_per_client": 240},
        "model": {"name": "mlp", "hidden": 64, "channels": [32, 64]},
        "local": {"steps": 5, "learning_rate": 0.1, "batch_size": "full", "momentum": 0.0, "weight_decay": 0.0},
        "topology": topology.model_dump(exclude_none=True),
        "mixing": {"weights": "uniform", "aggregation": "batch"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    environment = {
        "dfca": "0.1.0",
        "python": "3.11.4",
        "packages": {"torch": "2.6.0"},
        "device": "cpu",
        "commit": None,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    truth = [client % clusters for client in range(clients)]
    graphs = {seed: make_graph(topology, clients, seed) for seed in range(seeds)}
    stored = {
        str(seed): {
            "facts": describe(graph, truth if true_clusters else None),
            "edges": [list(edge) for edge in graph.edges],
            "clusters": truth if true_clusters else None,
        }
        for seed, graph in graphs.items()
    }
    (folder / "topology.json").write_text(json.dumps(stored))
    lines, rows = [], []
    for name in algorithms:
        for seed in range(seeds):
            done = (name, seed) not in unfinished
            cell = _cell(name, seed, truth, clusters, rounds if done else rounds // 2, every, graphs[seed].size())
            if not true_clusters:
                for line in cell:
                    line |= {"cluster_accuracy": None, "adjusted_rand_index": None, "all_models_accuracy": None}
            lines += cell
            if done:
                rows.append(_row(name, seed, cell[-1], clusters, rounds))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"experiment": "quickstart", "scale": "desk", "runs": rows}))
    return folder


def _cell(name: str, seed: int, truth: list[int], k: int, rounds: int, every: int, edges: int) -> list[dict[str, Any]]:
    level, right, models, talk = LEVELS[name]
    random = np.random.default_rng([seed, len(name), sum(map(ord, name))])
    collapsed = models == "k" and name not in ("oracle", "fedspd") and seed == 1
    level -= (0.08 if collapsed else 0) + random.normal(0, 0.004)
    lines = []
    for round in range(0, rounds + 1, every):
        progress = 1 - math.exp(-round / 9)
        share = None if right is None else 1.0 if name == "oracle" else 0.4 + (right - 0.4) * progress
        relabel = random.permutation(k) if round == 0 else relabel  # noqa: F821
        found = [int(relabel[c]) if share and random.random() < share else int(random.integers(k)) for c in truth]
        if collapsed:
            found = [0 if cluster == 1 else cluster for cluster in found]
        if share is not None:
            share = float(np.mean(match_clusters(found, truth) == np.array(truth)))
        m = k if models == "k" else 1
        sent = int(talk * 2 * edges * round * 19_400)
        lines.append(
            {
                "algorithm": name,
                "seed": seed,
                "round": round,
                "accuracy": 0.1 + (level - 0.1) * progress,
                "all_models_accuracy": 0.1 + (level - 0.12) * progress if m > 1 else None,
                "cluster_accuracy": share,
                "adjusted_rand_index": share,
                "live_clusters": len(set(found)) if m > 1 else 1,
                "changed": 2,
                "train_loss": 2.3 - 2 * progress,
                "F_global": 9.2 - 8 * progress,
                "disagreement": [0.0 if talk == 0.1 else 3 * math.exp(-round / 12) + 0.02] * m,
                "mixing_drift": [0.01] * m,
                "messages_sent": sent // 19_400,
                "bytes_sent": sent,
                "messages_by_client": [round] * len(truth),
                "messages_by_cluster": [round] * m,
                "assignments": found if m > 1 else [0] * len(truth),
                "seconds": {"assign": 0.1, "train": 0.4, "mix": 0.1, "evaluate": 0.2},
            }
        )
    return lines


def _row(name: str, seed: int, last: dict[str, Any], clusters: int, rounds: int) -> dict[str, Any]:
    keys = ("accuracy", "all_models_accuracy", "cluster_accuracy", "adjusted_rand_index", "live_clusters", "bytes_sent")
    return {
        "algorithm": name,
        "seed": seed,
        "clusters": clusters,
        "rounds": rounds,
        "seconds": 2.5,
        "finished": True,
        **{key: last[key] for key in keys},
        "models": clusters if LEVELS[name][2] == "k" else 1,
    }


def row(algorithm: str, seed: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "seed": seed,
        "accuracy": accuracy,
        "all_models_accuracy": None,
        "cluster_accuracy": None,
        "live_clusters": 1,
        "clusters": 2,
        "models": 1,
        "rounds": 5,
        "seconds": 2.0,
        "bytes_sent": 4_000_000,
        "finished": True,
        **more,
    }


SUMMARY = {
    "experiment": "hand-made",
    "scale": "desk",
    "runs": [
        row("dfca-gi", 0, 0.90, cluster_accuracy=1.0, models=2, live_clusters=2),
        row("dfca-gi", 1, 0.80, cluster_accuracy=0.5, models=2, live_clusters=1),
        row("ifca", 0, 0.95, cluster_accuracy=1.0, models=2, live_clusters=2),
        row("dfedavgm", 0, 0.70),
        row("dfedavgm", 1, 0.10, finished=False),
        row("local", 0, 0.99, bytes_sent=0),
        row("fedspd", 0, 0.30, models=2, live_clusters=2, cluster_accuracy=0.5, finished=False),
        row("oracle", 0, 1.0, models=2, live_clusters=2),
    ],
}


# --- tables


def test_rows_by_hand() -> None:
    rows = {each["algorithm"]: each for each in tables.summary_rows(SUMMARY, clients=4)}
    gi = rows["dfca-gi"]
    assert gi["accuracy_mean"] == pytest.approx(0.85)
    assert gi["accuracy_std"] == pytest.approx(math.sqrt(0.005))
    assert (gi["lost"], gi["lost_runs"], gi["runs"], gi["partial"]) == ("1 of 2", 1, 2, False)
    assert gi["megabytes_per_client"] == 1.0
    assert rows["dfedavgm"]["accuracy_mean"] == 0.70, "an unfinished run is not in the mean"
    assert (rows["dfedavgm"]["runs"], rows["dfedavgm"]["unfinished"]) == (1, 1)
    assert rows["dfedavgm"]["lost"] == "–", "one model cannot lose a cluster"
    assert rows["dfedavgm"]["accuracy_std"] is None
    assert (rows["fedspd"]["partial"], rows["fedspd"]["accuracy_mean"]) == (True, 0.30)
    best = {name: each["best"] for name, each in rows.items() if each["best"]}
    assert best == {"dfca-gi": ("accuracy",)}, "no server, no bound, nothing unfinished; no rival in cluster accuracy"


def test_megabytes_need_the_number_of_clients() -> None:
    assert tables.summary_rows(SUMMARY)[0]["megabytes_per_client"] is None
    assert tables.summary_rows({**SUMMARY, "clients": 8})[0]["megabytes_per_client"] == 0.5


def printed(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for table in formats.terminal_tables(SUMMARY, clients=4, width=width):
            console.print(table)
        console.print("\n".join(tables.notes(SUMMARY)))
    return capture.get()


def test_terminal_table() -> None:
    text = printed(100)
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "85.0 ± 7.1" in lines["dfca-gi"]
    assert "1 of 2" in lines["dfca-gi"]
    assert "1 + 1" in lines["dfedavgm"]
    assert "fedspd*" in lines
    assert "* not finished: the numbers so far" in text
    assert "oracle is told the true clusters" in text


@pytest.mark.parametrize("width", [100, 80, 60])
def test_the_terminal_table_is_never_cut(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    assert "85.0 ± 7.1" in text


def test_bold_in_markdown() -> None:
    lines = formats.markdown(SUMMARY, clients=4).splitlines()
    assert lines[0].startswith("| algorithm | talks to | accuracy % | right cluster % | lost a cluster |")
    assert lines[2].startswith("| dfca-gi | neighbours | **85.0 ± 7.1** | 75.0 ± 35.4 | 1 of 2 | 2 |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_an_algorithm_of_the_user_counts_as_decentralised() -> None:
    kind = tables.kind_of("mine")
    assert (kind.via, kind.informed) == ("neighbours", False)
    assert tables.kind_of("ifca").via == "server"
    assert tables.kind_of("oracle").informed
    assert tables.kind_of("local").via == "nobody"


# --- sweeps


def point(at: dict[str, Any], **more: Any) -> dict[str, Any]:
    label = ", ".join(f"{key}={value}" for key, value in at.items())
    facts = {"algorithms": ["dfca", "ifca"], "seeds": [0, 1], "clients": 4, "clusters": 2, "rounds": 5}
    return {"point": at, "label": label, "digest": label, **facts, **more}


def sweep_summary(*points: dict[str, Any]) -> dict[str, Any]:
    runs = [
        row(name, seed, accuracy, cluster_accuracy=1.0 - 0.5 * seed, models=2, live_clusters=2, digest=each["digest"])
        for each in points
        for name, accuracy in (("dfca", 0.9), ("ifca", 0.8))
        for seed in (0, 1)
    ]
    return {"experiment": "swept", "scale": "desk", "points": list(points), "runs": runs}


ONE_KEY = sweep_summary(point({"clients": 12}), point({"clients": 24}))
TWO_KEYS = sweep_summary(
    point({"topology.p": 0.1, "share": "all"}), point({"topology.name": "ring", "share": "all"}, auto=True)
)


def test_one_varying_key_is_crossed_with_the_algorithms() -> None:
    assert formats.markdown(ONE_KEY).splitlines()[:6] == [
        "**accuracy %**",
        "",
        "| clients | dfca | ifca |",
        "| --- | ---: | ---: |",
        "| 12 | 90.0 ± 0.0 | 80.0 ± 0.0 |",
        "| 24 | 90.0 ± 0.0 | 80.0 ± 0.0 |",
    ]
    titles = [sheet.title for sheet in tables.sheets(ONE_KEY)]
    assert titles == ["accuracy %", "right cluster %", "all clusters found", "MB per client"]
    assert tables.sheets(ONE_KEY)[2].rows[0][1].text == "1 of 2"


def test_several_keys_give_a_row_per_point_and_algorithm() -> None:
    (sheet,) = tables.sheets(TWO_KEYS)
    assert sheet.columns[:4] == ["topology.p", "topology.\nname", "share", "algorithm"]
    texts = [[entry.text for entry in each][:4] for each in sheet.rows]
    assert texts == [
        ["0.1", "", "all", "dfca"],
        ["", "", "", "ifca"],
        ["", "ring", "all", "dfca"],
        ["", "", "", "ifca"],
    ]
    k = sheet.columns.index("k found")
    assert [[entry.text for entry in each][k : k + 2] for each in sheet.rows][2:] == [["2", "2 of 2"], ["–", "–"]]


@pytest.mark.parametrize("width", [100, 80, 70])
@pytest.mark.parametrize("summary", [ONE_KEY, TWO_KEYS])
def test_sheets_leave_columns_out_before_they_are_cut(summary: dict[str, Any], width: int) -> None:
    assert max(sheet.width for sheet in tables.sheets(summary, width=width)) <= width


def test_on_a_narrow_terminal_every_point_has_its_own_table() -> None:
    titles = [sheet.title for sheet in tables.sheets(TWO_KEYS, width=80)]
    assert titles == ["topology.p=0.1, share=all", "topology.name=ring, share=all"]


def test_what_is_not_asked_for_any_more_is_left_out() -> None:
    rows = tables.summary_rows({**ONE_KEY, "points": ONE_KEY["points"][:1]})
    assert {each["label"] for each in rows} == {"clients=12"}
    assert tables.counts(ONE_KEY) == (8, 8)


def test_numbers_as_comma_separated_values() -> None:
    lines = formats.comma_separated(ONE_KEY).splitlines()
    assert lines[0].startswith("clients,algorithm,runs,unfinished,failed,accuracy_mean,accuracy_std,")
    assert lines[1].startswith("12,dfca,2,0,0,0.9,0.0,")
    assert len({line.count(",") for line in lines}) == 1
    assert formats.comma_separated(SUMMARY, clients=4).splitlines()[1].startswith("dfca-gi,2,0,0,0.85")


def test_latex_is_escaped() -> None:
    text = formats.latex(SUMMARY, clients=4)
    assert r"algorithm & talks to & accuracy \% & right cluster \% & lost a cluster & runs" in text
    assert r"dfca-gi & neighbours & \textbf{85.0 $\pm$ 7.1} & 75.0 $\pm$ 35.4 & 1 of 2 & 2" in text
    assert text.count(r"\toprule") == 1


def test_failures_are_in_the_notes() -> None:
    failed = {"algorithm": "ifca", "seed": 3, "digest": "clients=12", "finished": False, "error": "no room"}
    summary = {**ONE_KEY, "runs": [*ONE_KEY["runs"], failed]}
    assert "8 of 9 runs are finished" in tables.notes(summary)
    assert "failed: ifca, seed 3: no room" in tables.notes(summary)
    assert tables.summary_rows(summary)[1]["failed"] == 1


@pytest.mark.parametrize(
    ("values", "axis"), [((12, 24, 120), "linear"), ((0.02, 0.1, 0.5), "log"), ((0, 10, 100), "linear")]
)
def test_the_axis_of_a_key_is_logarithmic_beyond_a_factor_of_ten(values: tuple[float, ...], axis: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plots._values_axis(axes, values)
    assert axes.get_xscale() == axis
    assert set(axes.get_xticks()) <= set(values)


def test_results_as_one_file(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "results" / "quickstart.json"
    run = load_run(folder)
    save_results(run, path)
    again = load_results(path)
    assert formats.markdown(again, 24) == formats.markdown(run.summary, 24)
    assert path.stat().st_size < 40_000
    assert (again["config"], again["environment"]["device"]) == (run.config, "cpu")
    assert again["means"][0]["accuracy_mean"] == tables.summary_rows(run.summary)[0]["accuracy_mean"]
    for text in ("{", "[]", '{"dfca_results": 99, "runs": []}'):
        path.write_text(text)
        with pytest.raises(RunError, match=r"give a run folder or a file that `dfca report RUN --save FILE` wrote$"):
            load_results(path)


# --- the page


class Page(HTMLParser):
    """Collect ids, references and open tags."""

    VOID = frozenset({"meta", "br", "link", "img", "use", "path", "rect", "image"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        self.ids += [value for key, value in attributes if key == "id"]
        self.references += [value for key, value in attributes if key in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "whole")


def test_the_page_shows_the_table_and_needs_nothing_beside_it(folder: Path) -> None:
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    for each in tables.summary_rows(json.loads((folder / "summary.json").read_text())):
        assert tables.percent(each["accuracy_mean"], each["accuracy_std"]) in text
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "two figures share an id"
    assert all((each.startswith("#") and each[1:] in page.ids) or each.startswith("data:") for each in page.references)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert "http://" not in text
    assert "https://" not in text
    assert "script" not in page.tags
    assert "not finished" not in text
    assert "24 clients, 4 hidden groups of data, 40 rounds, 8 algorithms, 3 random seeds" in text
    assert len(text) < 2_000_000


def test_the_description_is_escaped_and_its_code_is_code(folder: Path) -> None:
    assert "a quarter of the <code>&lt;24&gt;</code> clients" in write_report(folder).read_text(encoding="utf-8")


def test_the_page_is_the_same_for_the_same_run(folder: Path) -> None:
    assert write_report(folder).read_text() == write_report(folder).read_text()


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, unfinished=(("dfca-li", 2), ("local", 0), ("local", 1), ("local", 2)))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"algorithm": "local", "se')  # killed in the middle of a line
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<b>This run is not finished:</b> 20 of 24 runs are done." in text
    assert "dfca-li seed 2 at round 20" in text
    assert '<td class="words">local*</td>' in text
    assert "<td>2 + 1</td>" in text
    assert Page(text).open == []
    assert load_run(folder).algorithms == list(LEVELS)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = write_run(tmp_path, algorithms=("dfca-gi",), seeds=1, unfinished=(("dfca-gi", 0),), rounds=2, every=5)
    assert "0 of 1 runs are done" in write_report(folder).read_text()
    (folder / "metrics.jsonl").write_text("")
    assert "No round has been evaluated yet." in write_report(folder).read_text()


def test_a_run_whose_true_clusters_nobody_knows(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, seeds=1, true_clusters=False)).read_text(encoding="utf-8")
    assert "true groups" not in text.split("<h2>Words</h2>")[0]
    assert "right cluster" not in text.split("<h2>Words</h2>")[0]
    assert "cluster 4" in text


def test_a_large_graph_keeps_the_page_small(tmp_path: Path) -> None:
    kinds = ("dfca-gi", "dfca-li", "ifca")
    folder = write_run(tmp_path, kinds, clients=320, seeds=1, topology=TopologyOptions(p=0.05))
    assert write_report(folder).stat().st_size < 1_000_000


def test_text_of_the_user_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path, algorithms=("local",), seeds=1)
    config = (folder / "config.toml").read_text().replace("Every algorithm", "<script>alert(1)</script>")
    (folder / "config.toml").write_text(config)
    assert "<script" not in write_report(folder).read_text()


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "summary.json", "metrics.jsonl", "topology.json"])
def test_a_missing_file_is_named_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path, algorithms=("local",), seeds=1)
    (folder / name).unlink()
    with pytest.raises(RunError) as caught:
        write_report(folder)
    assert str(caught.value) == (
        f"{folder} is not a complete run folder: {name} is missing; run the same `dfca run` command again"
    )


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, algorithms=("local",), seeds=1)
    with pytest.raises(RunError, match="is not a run folder: there is no such directory"):
        write_report(folder / "nowhere")
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{broken\n" + lines)
    with pytest.raises(RunError, match=r"metrics.jsonl, line 1, is not a line of metrics"):
        write_report(folder)
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "topology.json").write_text('{"0": {}}')
    with pytest.raises(RunError, match="files of another version or edited by hand"):
        write_report(folder)
    (folder / "summary.json").write_text("[]")
    with pytest.raises(RunError, match=r"summary.json must hold a JSON object, got list"):
        write_report(folder)
    (folder / "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary.json is not valid JSON"):
        write_report(folder)


# --- numbers and drawing


def test_curves_are_means_over_the_finished_runs(folder: Path) -> None:
    run = load_run(folder)
    curve = curve_of(run, "dfca-gi", "accuracy")
    assert curve is not None
    assert list(curve.x) == list(range(0, 41, 5))
    last = [line["accuracy"] for line in run.metrics if line["algorithm"] == "dfca-gi" and line["round"] == 40]
    assert curve.mean[-1] == pytest.approx(np.mean(last))
    assert curve.std is not None
    assert curve.std[-1] == pytest.approx(np.std(last, ddof=1))
    assert curve_of(run, "local", "cluster_accuracy") is None


def test_one_evaluation_is_no_curve(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", algorithms=("dfca-gi", "ifca")))
    assert set(curves_of(run, "accuracy")) == {"dfca-gi", "ifca"}
    last = max(line["round"] for line in run.metrics)
    assert curves_of(replace(run, metrics=[line for line in run.metrics if line["round"] == last]), "accuracy") == {}


def test_matching_by_hand() -> None:
    assert match_clusters([2, 2, 0, 0, 1], [0, 0, 1, 1, 2]).tolist() == [0, 0, 1, 1, 2]
    assert match_clusters([0, 0, 0, 0, 1], [0, 0, 1, 1, 1]).tolist() == [0, 0, 0, 0, 1]
    assert match_clusters([0, 1, 2, 2], [0, 0, 1, 1]).tolist() in ([0, -1, 1, 1], [-1, 0, 1, 1])


def test_labels_are_moved_apart_and_stay_in_the_axes() -> None:
    heights = plots._apart([0.1, 0.5, 0.51, 0.99, 1.0], 0.06)
    assert np.diff(heights).min() >= 0.06 - 1e-12
    assert heights[0] == pytest.approx(0.1, abs=0.06)
    assert max(heights) <= 1 + 1e-12
    assert np.mean(heights[1:3]) == pytest.approx(0.505, abs=0.06)


def test_an_algorithm_looks_the_same_whatever_else_is_drawn() -> None:
    few = plots.styles(["ifca"], {"ifca": "server"}, {})
    many = plots.styles(["mine", "ifca", "yours"], {"ifca": "server"}, {})
    assert few["ifca"] == many["ifca"]
    assert many["ifca"].dash == "--"
    assert many["mine"].colour != many["yours"].colour


def test_the_ringed_clients_are_drawn_beyond_the_links_of_one_graph() -> None:
    places = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    first, second = plots.networks(places, [[0, 1]], [([0, 1, 0], None), ([0, 1, 1], [False, False, True])])
    name = re.search(r'<g id="(links-\w+)"', first)
    assert name is not None
    assert f'<use href="#{name[1]}"/>' in second
    assert "currentColor" in second
    assert "currentColor" not in first


@pytest.mark.parametrize("module", [report, tables, formats])
def test_only_drawing_imports_matplotlib(module: ModuleType) -> None:
    # What a module imports when it is imported: not inside functions, not for the type checker.
    top = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")).body
    imports = [ast.unparse(line) for line in top if isinstance(line, ast.Import | ast.ImportFrom)]
    assert imports
    assert not [line for line in imports if "matplotlib" in line or "plots" in line]
