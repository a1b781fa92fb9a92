"""Tables of hand-made numbers, and the pages of real, tiny runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from rich.console import Console

from dfca.errors import RunError
from dfca.report import formats, plots, rows, tables
from dfca.report.curves import Curve, curve_of, curves_of
from dfca.report.page import write_report
from dfca.report.paper.cluster_map import match_clusters
from dfca.report.results import load_results, save_results, stored_run
from dfca.report.wording import percent
from dfca.runs.store import reading
from dfca.runs.store.reading import Run, load_run

ALGORITHMS = ["dfca-gi", "ifca", "dfedavgm", "local", "oracle"]


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


SUMMARY: dict[str, Any] = {
    "clients": 4,
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
    by_name = {each["algorithm"]: each for each in rows.summary_rows(SUMMARY)}
    gi = by_name["dfca-gi"]
    assert gi["accuracy_mean"] == pytest.approx(0.85)
    assert gi["accuracy_std"] == pytest.approx(math.sqrt(0.005))
    assert (gi["lost"], gi["lost_runs"], gi["runs"], gi["partial"]) == ("1 of 2", 1, 2, False)
    assert gi["megabytes_per_client"] == 1.0
    assert by_name["dfedavgm"]["accuracy_mean"] == 0.70, "an unfinished run is not in the mean"
    assert (by_name["dfedavgm"]["runs"], by_name["dfedavgm"]["unfinished"]) == (1, 1)
    assert by_name["dfedavgm"]["lost"] == "–", "one model cannot lose a cluster"
    assert by_name["dfedavgm"]["accuracy_std"] is None
    assert (by_name["fedspd"]["partial"], by_name["fedspd"]["accuracy_mean"]) == (True, 0.30)
    best = {name: each["best"] for name, each in by_name.items() if each["best"]}
    assert best == {"dfca-gi": ("accuracy",)}, "no server, no bound, nothing unfinished; no rival in cluster accuracy"


def test_megabytes_need_the_number_of_clients() -> None:
    assert rows.summary_rows({**SUMMARY, "clients": None})[0]["megabytes_per_client"] is None
    assert rows.summary_rows({**SUMMARY, "clients": 8})[0]["megabytes_per_client"] == 0.5


def printed(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for table in formats.terminal_tables(SUMMARY, width=width):
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
    assert "oracle knows the true clusters" in text


@pytest.mark.parametrize("width", [100, 80, 60])
def test_the_terminal_table_is_never_cut(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    assert "85.0 ± 7.1" in text


def test_bold_in_markdown() -> None:
    lines = formats.markdown(SUMMARY).splitlines()
    assert lines[0].startswith("| algorithm | talks to | accuracy % | right cluster % | lost a cluster |")
    assert lines[2].startswith("| dfca-gi | neighbours | **85.0 ± 7.1** | 75.0 ± 35.4 | 1 of 2 | 2 |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_an_algorithm_of_the_user_counts_as_decentralised() -> None:
    kind = rows.kind_of("mine")
    assert (kind.via, kind.informed) == ("neighbours", False)
    assert rows.kind_of("ifca").via == "server"
    assert rows.kind_of("oracle").informed
    assert rows.kind_of("local").via == "nobody"


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
    titles = [table.title for table in tables.result_tables(ONE_KEY)]
    assert titles == ["accuracy %", "right cluster %", "all clusters found", "MB per client"]
    assert tables.result_tables(ONE_KEY)[2].rows[0][1].text == "1 of 2"


def test_several_keys_give_a_row_per_point_and_algorithm() -> None:
    (table,) = tables.result_tables(TWO_KEYS)
    assert table.columns[:4] == ["topology.p", "topology.\nname", "share", "algorithm"]
    texts = [[cell.text for cell in each][:4] for each in table.rows]
    assert texts == [
        ["0.1", "", "all", "dfca"],
        ["", "", "", "ifca"],
        ["", "ring", "all", "dfca"],
        ["", "", "", "ifca"],
    ]
    k = table.columns.index("k found")
    assert [[cell.text for cell in each][k : k + 2] for each in table.rows][2:] == [["2", "2 of 2"], ["–", "–"]]


@pytest.mark.parametrize("width", [100, 80, 70])
@pytest.mark.parametrize("summary", [ONE_KEY, TWO_KEYS])
def test_tables_leave_columns_out_before_they_are_cut(summary: dict[str, Any], width: int) -> None:
    assert max(table.width for table in tables.result_tables(summary, width=width)) <= width


def test_on_a_narrow_terminal_every_point_has_its_own_table() -> None:
    titles = [table.title for table in tables.result_tables(TWO_KEYS, width=80)]
    assert titles == ["topology.p=0.1, share=all", "topology.name=ring, share=all"]


def test_what_is_not_asked_for_any_more_is_left_out() -> None:
    left = rows.summary_rows({**ONE_KEY, "points": ONE_KEY["points"][:1]})
    assert {each["label"] for each in left} == {"clients=12"}
    assert reading.count_trials(ONE_KEY) == (8, 8)


def test_numbers_as_comma_separated_values() -> None:
    lines = formats.comma_separated(ONE_KEY).splitlines()
    assert lines[0].startswith("clients,algorithm,runs,unfinished,failed,accuracy_mean,accuracy_std,")
    assert lines[1].startswith("12,dfca,2,0,0,0.9,0.0,")
    assert len({line.count(",") for line in lines}) == 1
    assert formats.comma_separated(SUMMARY).splitlines()[1].startswith("dfca-gi,2,0,0,0.85")


def test_latex_is_escaped() -> None:
    text = formats.latex(SUMMARY)
    assert r"algorithm & talks to & accuracy \% & right cluster \% & lost a cluster & runs" in text
    assert r"dfca-gi & neighbours & \textbf{85.0 $\pm$ 7.1} & 75.0 $\pm$ 35.4 & 1 of 2 & 2" in text
    assert text.count(r"\toprule") == 1


def test_failures_are_in_the_notes() -> None:
    failed = {"algorithm": "ifca", "seed": 3, "digest": "clients=12", "finished": False, "error": "no room"}
    summary = {**ONE_KEY, "runs": [*ONE_KEY["runs"], failed]}
    assert "8 of 9 runs are finished" in tables.notes(summary)
    assert "failed: ifca, seed 3: no room" in tables.notes(summary)
    assert rows.summary_rows(summary)[1]["failed"] == 1


@pytest.mark.parametrize(
    ("values", "axis"), [((12, 24, 120), "linear"), ((0.02, 0.1, 0.5), "log"), ((0, 10, 100), "linear")]
)
def test_the_axis_of_a_key_is_logarithmic_beyond_a_factor_of_ten(values: tuple[float, ...], axis: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plots.values_axis(axes, values)
    assert axes.get_xscale() == axis
    assert set(axes.get_xticks()) <= set(values)


def test_results_as_one_file(tmp_path: Path, run_folder: Path) -> None:
    path = tmp_path / "results" / "quickstart.json"
    run = load_run(run_folder)
    save_results(run, path)
    again = load_results(path)
    assert formats.markdown(again) == formats.markdown(run.summary) == formats.markdown(stored_run(path).summary)
    assert path.stat().st_size < 20_000
    assert (again["config"], again["environment"]["device"]) == (run.config, "cpu")
    assert again["means"][0]["accuracy_mean"] == rows.summary_rows(run.summary)[0]["accuracy_mean"]
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


Changes = Callable[..., Path]


@pytest.fixture
def changed(tmp_path: Path) -> Changes:
    """Copy a run folder and change its files: functions of what they hold, by name."""

    def copy(folder: Path, **changes: Callable[[Any], Any]) -> Path:
        out = tmp_path / "run"
        shutil.copytree(folder, out)
        (out / "report.html").unlink()
        summary = json.loads((out / "summary.json").read_text())
        summary = changes.get("summary", lambda value: value)(summary | {"config_sha256": None})
        (out / "summary.json").write_text(json.dumps(summary))
        for key, name in (("config", "config.toml"), ("topology", "topology.json")):
            if key in changes:
                (out / name).write_text(changes[key]((out / name).read_text()))
        if "metrics" in changes:
            text = "".join(json.dumps(line) + "\n" for line in load_run(folder).metrics)
            put_metrics(out, changes["metrics"](text))
        return out

    return copy


def put_metrics(folder: Path, text: str) -> None:
    """Write the metrics of all trials into one file."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        shutil.rmtree(folder / "metrics")
        path = folder / "metrics" / "all.jsonl"
        path.parent.mkdir()
    path.write_text(text)


def page_of(folder: Run | Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_page_shows_the_table_and_needs_nothing_beside_it(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text(encoding="utf-8")
    for each in rows.summary_rows(json.loads((run_folder / "summary.json").read_text())):
        assert percent(each["accuracy_mean"], each["accuracy_std"]) in text
    for heading in ("In short", "Results", "By round", "What the clients hold", "Who found whom", "What was run"):
        assert f"<h2>{heading}</h2>" in text
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "two figures share an id"
    assert all((each.startswith("#") and each[1:] in page.ids) or each.startswith("data:") for each in page.references)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert "http://" not in text
    assert "https://" not in text
    assert "script" not in page.tags
    assert "not finished" not in text
    assert "8 clients, 2 hidden groups of data, 4 rounds, 5 algorithms, 2 random seeds, on <b>digits</b>." in text
    assert "Half of the <code>&lt;8&gt;</code> clients" in text
    assert len(text) < 300_000


def test_the_page_is_the_same_for_the_same_run_and_reads_it_once(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run = (run_folder / "report.html").read_text(), load_run(run_folder)
    monkeypatch.setattr(reading, "_read", lambda path: pytest.fail(f"{path} is read again"))
    assert page_of(run) == before


def test_an_unfinished_run_says_so(run_folder: Path, changed: Changes) -> None:
    def stop(summary: dict[str, Any]) -> dict[str, Any]:
        kept = [
            row
            for row in summary["runs"]
            if row["algorithm"] != "local" and (row["algorithm"], row["seed"]) != ("ifca", 1)
        ]
        return summary | {"runs": kept}

    folder = changed(run_folder, summary=stop, metrics=lambda text: text + '{"algorithm": "local", "se')  # killed
    text = page_of(folder)
    assert "<b>This run is not finished:</b> 7 of 10 runs are done." in text
    assert "ifca seed 1 at round 4" in text
    assert '<tr class="partial"><td class="words">local*</td>' in text
    assert "<td>1 + 1</td>" in text
    assert Page(text).open == []
    assert load_run(folder).algorithms == ALGORITHMS


def test_a_run_that_has_only_begun(run_folder: Path, changed: Changes) -> None:
    text = page_of(changed(run_folder, summary=lambda value: value | {"runs": []}, metrics=lambda _: ""))
    assert "No round has been evaluated yet." in text
    assert "0 of 10 runs are done" in text


def test_a_run_whose_true_clusters_nobody_knows(run_folder: Path, changed: Changes) -> None:
    unknown = ("cluster_accuracy", "adjusted_rand_index", "all_models_accuracy")

    def forget(record: dict[str, Any]) -> dict[str, Any]:
        return record | {key: None for key in unknown if key in record}

    def lines(text: str) -> str:
        return "".join(json.dumps(forget(json.loads(line))) + "\n" for line in text.splitlines())

    def graphs(text: str) -> str:
        return json.dumps({seed: graph | {"clusters": None} for seed, graph in json.loads(text).items()})

    def summary(value: dict[str, Any]) -> dict[str, Any]:
        return value | {"runs": [forget(row) for row in value["runs"]]}

    text = page_of(changed(run_folder, summary=summary, metrics=lines, topology=graphs)).split("<h2>Words</h2>")[0]
    assert "those of the first one" in text
    assert "true groups" not in text
    assert "right cluster" not in text
    assert "</i>cluster 2</span>" in text


def test_a_large_graph_keeps_the_page_small() -> None:
    graph = nx.gnp_random_graph(320, 0.05, seed=0)
    places = np.random.default_rng(0).normal(size=(320, 2))
    clusters = [client % 4 for client in graph]
    drawn = plots.networks(places, list(graph.edges), [(clusters, None)] * 3)
    assert sum(map(len, drawn)) < 500_000


EVIL = "<script>alert(1)"


@pytest.mark.parametrize("kind", ["run", "sweep", "theory", "virtual"])
def test_text_of_the_user_cannot_become_markup(kind: str, changed: Changes, request: pytest.FixtureRequest) -> None:
    """Titles, names of algorithms, data and versions are escaped on every kind of page."""

    def summary(value: dict[str, Any]) -> dict[str, Any]:
        value = json.loads(json.dumps(value).replace('"dfca-gi"', json.dumps(EVIL)))
        for point in value.get("points", ()):
            point["label"] += EVIL
        failed = {**value["runs"][0], "seed": 77, "finished": False, "error": EVIL}
        return value | {"experiment": EVIL, "scale": EVIL, "runs": [*value["runs"], failed]}

    def config(text: str) -> str:
        text = re.sub("^(title|description) = .*$", "", text, flags=re.MULTILINE).replace('"dfca-gi"', f'"{EVIL}"')
        return f'title = "{EVIL}"\ndescription = "`{EVIL}`"\n' + text.replace('"digits"', f'"{EVIL}"')

    source: Path = request.getfixturevalue(f"{kind}_folder")
    folder = changed(
        source, summary=summary, config=config, metrics=lambda text: text.replace('"dfca-gi"', f'"{EVIL}"')
    )
    (folder / "environment.json").write_text(json.dumps({"dfca": EVIL, EVIL: [{EVIL: EVIL}]}))
    text = page_of(folder)
    assert "<script" not in text
    assert "<title>&lt;script&gt;alert(1) – dfca report</title>" in text
    assert "<code>&lt;script&gt;alert(1)</code>" in text
    assert text.count("&lt;script&gt;alert(1)") > 15
    assert Page(text).open == []


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "summary.json", "metrics", "topology.json"])
def test_a_missing_file_is_named_in_one_sentence(run_folder: Path, changed: Changes, name: str) -> None:
    folder = changed(run_folder)
    if name == "metrics" and not (folder / name).exists():
        name = "metrics.jsonl"
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    with pytest.raises(RunError) as caught:
        write_report(folder)
    assert str(caught.value) == (
        f"{folder} is not a complete run folder: {name} is missing; run the same `dfca run` command again"
    )


def test_damaged_files_are_named(run_folder: Path, changed: Changes) -> None:
    folder = changed(run_folder)
    with pytest.raises(RunError, match="is not a run folder: there is no such directory"):
        write_report(folder / "nowhere")
    put_metrics(folder, "{broken\n{}\n")
    with pytest.raises(RunError, match=r"\.jsonl, line 1, is not a line of metrics"):
        write_report(folder)
    put_metrics(folder, "")
    for name, text, sentence in (
        ("topology.json", '{"0": {}}', "files of another version or edited by hand"),
        ("summary.json", "[]", "summary.json must hold a JSON object, got list"),
        ("summary.json", "{", "summary.json is not valid JSON"),
    ):
        (folder / name).write_text(text)
        with pytest.raises(RunError, match=re.escape(sentence)):
            write_report(folder)


# --- sweeps as pages


def test_the_page_of_a_sweep_also_while_it_runs(sweep_folder: Path, changed: Changes) -> None:
    page = (sweep_folder / "report.html").read_text()
    assert "<h2>Against topology.p</h2>" in page
    assert "<h3>topology.p=0.9</h3>" in page
    assert "2 points (topology.p), 12 clients" in page
    assert "Who found whom" not in page
    half = changed(
        sweep_folder,
        summary=lambda value: value | {"runs": value["runs"][:1]},
        metrics=lambda text: "".join(text.splitlines(keepends=True)[:5]),
    )
    made = {(row["label"], row["algorithm"]): row for row in rows.summary_rows(load_run(half).summary)}
    first, second = (load_run(half).summary["runs"][i] for i in (0, 1))
    assert (first["finished"], second["finished"]) == (True, False)
    assert any(row["partial"] or row["unfinished"] for row in made.values())
    assert "1 of 8 runs are done" in page_of(half)


def test_a_point_of_a_sweep_has_its_own_config(sweep_folder: Path) -> None:
    run = load_run(sweep_folder)
    parts = [run.at(point) for point in run.summary["points"]]
    assert [part.config["topology"]["p"] for part in parts] == [0.1, 0.9]
    assert not any(part.swept or "grid" in part.config for part in parts)
    assert parts[1].seeds == [0, 1]
    unreadable = replace(run, config_text="clients = -1")
    assert unreadable.at(run.summary["points"][1]).config["topology"]["p"] == 0.9


# --- numbers and drawing


def test_curves_are_means_over_the_finished_runs(run_folder: Path) -> None:
    run = load_run(run_folder)
    curve = curve_of(run, "dfca-gi", "accuracy")
    assert curve is not None
    assert list(curve.x) == [2, 4]
    last = [line["accuracy"] for line in run.metrics if line["algorithm"] == "dfca-gi" and line["round"] == 4]
    assert curve.mean[-1] == pytest.approx(np.mean(last))
    assert curve.std is not None
    assert curve.std[-1] == pytest.approx(np.std(last, ddof=1))
    assert curve_of(run, "local", "cluster_accuracy") is None
    half = [row | {"finished": row["seed"] == 1} for row in run.summary["runs"]]
    mine = [line for line in run.metrics if line["algorithm"] == "dfca-gi" and line["seed"] == 1]
    partly = curve_of(replace(run, summary=run.summary | {"runs": half}), "dfca-gi", "accuracy")
    assert partly == ([2, 4], [line["accuracy"] for line in mine], None)


def test_one_evaluation_is_no_curve(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert set(curves_of(run, "accuracy")) == set(ALGORITHMS)
    assert curves_of(replace(run, metrics=[line for line in run.metrics if line["round"] == 4]), "accuracy") == {}


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


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    names = [r"my$_{5}$", r"$\wrong", r"$\frac$"]
    style = {name: plots.Style("#000000", "-") for name in names}
    curves = {name: Curve([1.0, 2.0], [0.1 * i, 0.5]) for i, name in enumerate(names)}
    for figure in (
        plots.draw_curves(curves, style, "accuracy"),
        plots.draw_bars(dict.fromkeys(names, 1.0), style, "MB", dict.fromkeys(names, "1")),
    ):
        assert all(f">{name}<" in plots.to_svg(figure) for name in names)
        assert [path.suffix for path in plots.save(figure, tmp_path / "figure")] == [".png", ".svg", ".pdf"]
