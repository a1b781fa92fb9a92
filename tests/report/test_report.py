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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from metric_lines import put_metrics
from reports import report_of
from rich.console import Console

from dfca.base.errors import ConfigError, RunError
from dfca.report import findings, formats, rows, tables
from dfca.report.drawing import plots, svg
from dfca.report.drawing.axes import Style, move_apart, values_axis, zoom_of
from dfca.report.drawing.curves import ScoreCurve, curve_of, curves_of, known_value
from dfca.report.drawing.multiples import by_round_figures, in_one_axis
from dfca.report.drawing.svg import FigureSize, sized
from dfca.report.page import write_report
from dfca.report.paper import figures
from dfca.report.paper.cluster_map import match_clusters
from dfca.report.results import load_results, save_results
from dfca.report.rows import RunReport
from dfca.report.setting import about_algorithm
from dfca.report.wording import percent
from dfca.runs.store import folder as store_folder
from dfca.runs.store.reading import load_run
from dfca.sim.metrics_table import EvaluationRow

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
    by_name = {row.algorithm: row for row in report_of(SUMMARY).rows}
    gi = by_name["dfca-gi"]
    assert gi.score.mean == pytest.approx(0.85)
    assert gi.score.std == pytest.approx(math.sqrt(0.005))
    assert (gi.lost, gi.lost_runs, gi.runs, gi.partial) == ("1 of 2", 1, 2, False)
    assert gi.megabytes_per_client == 2.0, "sent and received"
    assert by_name["dfedavgm"].score.mean == 0.70, "an unfinished run is not in the mean"
    assert (by_name["dfedavgm"].runs, by_name["dfedavgm"].unfinished) == (1, 1)
    assert by_name["dfedavgm"].lost == "–", "one model cannot lose a cluster"
    assert by_name["dfedavgm"].score.std is None
    assert (by_name["fedspd"].partial, by_name["fedspd"].score.mean) == (True, 0.30)
    best = {name: row.best for name, row in by_name.items() if row.best}
    assert best == {"dfca-gi": ("score",)}, "no server, no bound, nothing unfinished; no rival in cluster accuracy"


def test_megabytes_need_the_number_of_clients() -> None:
    assert report_of({**SUMMARY, "clients": None}).rows[0].megabytes_per_client is None
    assert report_of({**SUMMARY, "clients": 8}).rows[0].megabytes_per_client == 1.0


def printed(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        shown = formats.all_tables(report_of(SUMMARY), width)
        for table in formats.terminal_tables(shown, width):
            console.print(table)
        console.print("\n".join(tables.notes(report_of(SUMMARY))))
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
    lines = formats.markdown(report_of(SUMMARY)).splitlines()
    assert lines[0].startswith(
        "| algorithm | talks to | accuracy % | minus local | right cluster % | all clusters found |"
    )
    assert lines[2].startswith("| dfca-gi | neighbours | **85.0 ± 7.1** | −9.0 | 75.0 ± 35.4 | 1 of 2 | 2 |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


# --- differences


def seeds_of(name: str, scores: list[float], **more: Any) -> list[dict[str, Any]]:
    return [row(name, seed, score, **more) for seed, score in enumerate(scores)]


COMPARED: dict[str, Any] = {
    "clients": 4,
    "runs": [
        *seeds_of("dfca-auto", [0.90, 0.80, 0.85, 0.95, 0.88], momentum=0.9, diverged_clients=0),
        *seeds_of("ifca", [0.81, 0.70, 0.76, 0.84, 0.78], momentum=0.0, diverged_clients=0),
        *seeds_of("local", [0.91, 0.79, 0.86, 0.94, 0.88], momentum=0.0, diverged_clients=0),
        *seeds_of("dfedavgm", [0.2, 0.1, 0.3, 0.2, 0.2], momentum=0.9, diverged_clients=4)[:3],
        *seeds_of("dfedavgm", [0.2] * 5, momentum=0.9, diverged_clients=0)[3:],
        *seeds_of("ifca, momentum 0.9", [0.83, 0.72, 0.79, 0.86, 0.80], momentum=0.9, diverged_clients=0),
    ],
}


def test_differences_are_paired_by_seed() -> None:
    by_name = {row.algorithm: row for row in report_of(COMPARED).rows}
    assert by_name["ifca"].compared is not None
    difference = by_name["ifca"].compared.difference
    # d = -0.09, -0.10, -0.09, -0.11, -0.10: mean -0.098, s = 0.00837; of 4 comparisons t(4) = 4.315, half = 0.0161
    assert difference.mean == pytest.approx(-0.098)
    assert difference.half == pytest.approx(0.0161, abs=1e-4)
    assert by_name["ifca"].score.std is not None
    assert by_name["ifca"].score.std > 0.05, "what the seeds do is ten times as much"
    assert by_name["dfca-auto"].compared is None
    lines = formats.markdown(report_of(COMPARED)).splitlines()
    assert lines[0].startswith("| algorithm | talks to | accuracy % | minus dfca-auto ± 95 % | runs |")
    assert lines[3].startswith("| ifca | server | 77.8 ± 5.3 | −9.8 ± 1.6† |")
    assert lines[4].startswith("| local | nobody | 87.6 ± 5.7 | 0.0 ± 1.9 |")


def test_notes_name_differences_beyond_chance_diverged_runs_and_momentum() -> None:
    text = "\n".join(tables.notes(report_of(COMPARED)))
    assert (
        '† beyond chance: worse than dfca-auto: ifca, dfedavgm ‡, "ifca, momentum 0.9"; within chance: local'
    ) in text
    assert "adjusted for the 4 comparisons of this table; † the interval does not contain 0" in text
    assert "‡ diverged: dfedavgm in 3 of 5 seeds" in text
    assert 'momentum in training: 0.9 dfca-auto, dfedavgm, "ifca, momentum 0.9"; 0 ifca, local' in text
    assert "| dfedavgm ‡ |" in formats.markdown(report_of(COMPARED))


def test_a_page_says_once_what_is_beyond_chance_and_what_the_dagger_means(tmp_path: Path) -> None:
    report = RunReport.of(replace(report_of(COMPARED).run, folder=tmp_path))
    text = write_report(report).read_text()
    assert text.count("worse than dfca-auto: ifca") == 1
    assert text.count("the interval does not contain 0") == 1


def test_the_sign_is_that_of_the_score_where_less_is_better() -> None:
    facts = {"name": "RMSE", "key": "rmse", "higher_is_better": False, "percent": False}

    def scored(name: str, scores: list[float]) -> list[dict[str, Any]]:
        made = seeds_of(name, [0.0] * len(scores), metric=facts)
        return [{**line, "rmse": score, "all_models_rmse": score} for line, score in zip(made, scores, strict=True)]

    summary = {"clients": 4, "runs": [*scored("dfca-auto", [0.30, 0.32, 0.31]), *scored("local", [0.51, 0.52, 0.515])]}
    text = formats.markdown(report_of(summary))
    assert "+0.205 ± 0.012†" in text
    assert "worse than dfca-auto: local" in text
    assert "+ is more RMSE, which is worse" in text


def test_of_a_sweep_every_point_has_its_comparisons() -> None:
    points = [point({"clients": number}) for number in (12, 24)]
    runs = []
    for swept, gap in zip(points, (0.1, 0.0), strict=True):
        for name, off in (("dfca-auto", 0.0), ("ifca", gap)):
            scores = [0.9 - off, 0.8 - 1.1 * off, 0.85 - 0.9 * off]
            runs += seeds_of(name, scores, digest=swept["digest"], cluster_accuracy=1.0)
    summary = {"experiment": "swept", "scale": "desk", "points": points, "runs": runs}
    table = tables.result_tables(report_of(summary))[1]
    assert (table.title, table.columns) == ("accuracy %: minus dfca-auto ± 95 %", ["clients", "ifca"])
    assert [[cell.text for cell in cells] for cells in table.rows] == [["12", "−10.0 ± 3.6†"], ["24", "0.0 ± 0.0"]]
    assert "worse than dfca-auto: ifca at 1 of 2 points; all else is within chance" in "\n".join(
        tables.notes(report_of(summary))
    )
    numbers = formats.comma_separated(report_of(summary)).splitlines()
    assert numbers[0].endswith("paired_difference,paired_half_interval,paired_p,paired_seeds,verdict")
    assert numbers[2].endswith(",3,worse")


def test_old_runs_that_diverged_are_known_by_their_loss() -> None:
    old = [*seeds_of("dfca-auto", [0.9, 0.8], train_loss=0.1), *seeds_of("dfedavgm", [0.2, 0.3], train_loss=4.7e10)]
    diverged = {row.algorithm: row.diverged_runs for row in report_of({"clients": 4, "runs": old}).rows}
    assert diverged == {"dfca-auto": 0, "dfedavgm": 2}
    few = seeds_of("dfca-auto", [0.9], diverged_clients=1)
    assert report_of({"clients": 40, "runs": few}).rows[0].diverged_runs == 0, "one client of forty"


def test_an_algorithm_of_the_user_counts_as_decentralised() -> None:
    kind = rows.kind_of("mine")
    assert (kind.via, kind.informed) == ("neighbours", False)
    assert rows.kind_of("ifca").via == "server"
    assert rows.kind_of("oracle").informed
    assert rows.kind_of("local").via == "nobody"
    assert rows.kind_of("ifca, momentum 0.9").via == "server"


# --- sweeps


def point(at: dict[str, Any], **more: Any) -> dict[str, Any]:
    label = ", ".join(f"{key}={value}" for key, value in at.items())
    facts = {"algorithms": ["dfca-auto", "ifca"], "seeds": [0, 1], "clients": 4, "clusters": 2, "rounds": 5}
    return {"point": at, "label": label, "digest": label, **facts, **more}


def sweep_summary(*points: dict[str, Any]) -> dict[str, Any]:
    runs = [
        row(name, seed, accuracy, cluster_accuracy=1.0 - 0.5 * seed, models=2, live_clusters=2, digest=swept["digest"])
        for swept in points
        for name, accuracy in (("dfca-auto", 0.9), ("ifca", 0.8))
        for seed in (0, 1)
    ]
    return {"experiment": "swept", "scale": "desk", "points": list(points), "runs": runs}


ONE_KEY = sweep_summary(point({"clients": 12}), point({"clients": 24}))
TWO_KEYS = sweep_summary(
    point({"topology.p": 0.1, "share": "all"}), point({"topology.name": "ring", "share": "all"}, auto=True)
)


def test_one_varying_key_is_crossed_with_the_algorithms() -> None:
    assert formats.markdown(report_of(ONE_KEY)).splitlines()[:6] == [
        "**accuracy %**",
        "",
        "| clients | dfca-auto | ifca |",
        "| --- | ---: | ---: |",
        "| 12 | 90.0 ± 0.0 | 80.0 ± 0.0 |",
        "| 24 | 90.0 ± 0.0 | 80.0 ± 0.0 |",
    ]
    titles = [table.title for table in tables.result_tables(report_of(ONE_KEY))]
    assert titles == [
        "accuracy %",
        "accuracy %: minus dfca-auto ± 95 %",
        "right cluster %",
        "all clusters found",
        "MB per client",
    ]
    assert tables.result_tables(report_of(ONE_KEY))[3].rows[0][1].text == "1 of 2"


def test_several_keys_give_a_row_per_point_and_algorithm() -> None:
    (table,) = tables.result_tables(report_of(TWO_KEYS))
    assert table.columns[:4] == ["topology.p", "topology.\nname", "share", "algorithm"]
    texts = [[cell.text for cell in cells][:4] for cells in table.rows]
    assert texts == [
        ["0.1", "", "all", "dfca-auto"],
        ["", "", "", "ifca"],
        ["", "ring", "all", "dfca-auto"],
        ["", "", "", "ifca"],
    ]
    k = table.columns.index("k found")
    assert [[cell.text for cell in cells][k : k + 2] for cells in table.rows][2:] == [["2", "2 of 2"], ["–", "–"]]


@pytest.mark.parametrize("width", [100, 80, 70])
@pytest.mark.parametrize("summary", [ONE_KEY, TWO_KEYS])
def test_tables_leave_columns_out_before_they_are_cut(summary: dict[str, Any], width: int) -> None:
    assert max(table.width for table in tables.result_tables(report_of(summary), width=width)) <= width


def test_on_a_narrow_terminal_every_point_has_its_own_table() -> None:
    titles = [table.title for table in tables.result_tables(report_of(TWO_KEYS), width=80)]
    assert titles == ["topology.p=0.1, share=all", "topology.name=ring, share=all"]


def test_trials_that_are_no_longer_in_the_experiment_are_left_out() -> None:
    left = report_of({**ONE_KEY, "points": ONE_KEY["points"][:1]}).rows
    assert {row.label for row in left} == {"clients=12"}
    assert report_of(ONE_KEY).run.trial_counts == (8, 8)


def test_numbers_as_comma_separated_values() -> None:
    lines = formats.comma_separated(report_of(ONE_KEY)).splitlines()
    assert lines[0].startswith("clients,algorithm,runs,unfinished,failed,accuracy_mean,accuracy_std,")
    assert lines[1].startswith("12,dfca-auto,2,0,0,0.9,0.0,")
    assert len({line.count(",") for line in lines}) == 1
    assert formats.comma_separated(report_of(SUMMARY)).splitlines()[1].startswith("dfca-gi,2,0,0,0.85")


def test_latex_is_escaped() -> None:
    text = formats.latex(report_of(SUMMARY))
    assert r"algorithm & talks to & accuracy \% & minus local & right cluster \% & all clusters found & runs" in text
    assert r"dfca-gi & neighbours & \textbf{85.0 $\pm$ 7.1} & $-$9.0 & 75.0 $\pm$ 35.4 & 1 of 2 & 2" in text
    assert text.count(r"\toprule") == 1


def test_failures_are_in_the_notes() -> None:
    failed = {"algorithm": "ifca", "seed": 3, "digest": "clients=12", "finished": False, "error": "no room"}
    summary = {**ONE_KEY, "runs": [*ONE_KEY["runs"], failed]}
    assert "8 of 9 runs are finished" in tables.notes(report_of(summary))
    assert "failed: ifca, seed 3: no room" in tables.notes(report_of(summary))
    assert report_of(summary).rows[1].failed == 1


@pytest.mark.parametrize(
    ("values", "axis"), [((12, 24, 120), "linear"), ((0.02, 0.1, 0.5), "log"), ((0, 10, 100), "linear")]
)
def test_the_axis_of_a_key_is_logarithmic_beyond_a_factor_of_ten(values: tuple[float, ...], axis: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    values_axis(axes, values)
    assert axes.get_xscale() == axis
    assert set(axes.get_xticks()) <= set(values)


def test_results_as_one_file(tmp_path: Path, run_folder: Path) -> None:
    path = tmp_path / "results" / "quickstart.json"
    report = report_of(run_folder)
    save_results(report, path)
    again = load_results(path)
    assert formats.markdown(report_of(path)) == formats.markdown(report)
    assert path.stat().st_size < 20_000
    assert (again["config"], again["environment"]["device"]) == (report.run.config, "cpu")
    assert again["means"][0]["accuracy_mean"] == report.rows[0].score.mean
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
            text = "".join(json.dumps(line.stored) + "\n" for line in load_run(folder).metrics)
            put_metrics(out, changes["metrics"](text))
        return out

    return copy


def page_of(folder: RunReport | Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_page_shows_the_table_and_needs_nothing_beside_it(run_folder: Path) -> None:
    text = (run_folder / "report.html").read_text(encoding="utf-8")
    for row in report_of(run_folder).rows:
        assert percent(*row.score) in text
    headings = ("In short", "Results", "By round", "What the clients hold", "Clusters on the graph", "What was run")
    for heading in headings:
        assert f"<h2>{heading}</h2>" in text
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "two figures share an id"
    assert all(
        (reference.startswith("#") and reference[1:] in page.ids) or reference.startswith("data:")
        for reference in page.references
    )
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
    before, report = (run_folder / "report.html").read_text(), report_of(run_folder)
    monkeypatch.setattr(store_folder, "stored_text", lambda path: pytest.fail(f"{path} is read again"))
    assert page_of(report) == before


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


def test_a_run_whose_true_clusters_are_unknown(run_folder: Path, changed: Changes) -> None:
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
    with pytest.raises(RunError, match="lacks lines of metrics: dfca-gi, seed 0, has 0 of 2"):
        write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["runs"] = [{key: value for key, value in run.items() if key != "lines"} for run in summary["runs"]]
    (folder / "summary.json").write_text(json.dumps(summary))  # as version 0.2 wrote it
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
    assert "Clusters on the graph" not in page
    half = changed(
        sweep_folder,
        summary=lambda value: value | {"runs": value["runs"][:1]},
        metrics=lambda text: "".join(text.splitlines(keepends=True)[:5]),
    )
    report = report_of(half)
    first, second = report.run.trials[:2]
    assert (first.finished, second.finished) == (True, False)
    assert any(row.partial or row.unfinished for row in report.rows)
    assert "1 of 8 runs are done" in page_of(half)


def test_a_point_of_a_sweep_has_its_own_config(sweep_folder: Path) -> None:
    run = load_run(sweep_folder)
    parts = [run.at(point) for point in run.points]
    assert [part.config["topology"]["p"] for part in parts] == [0.1, 0.9]
    assert not any(part.swept or "grid" in part.config for part in parts)
    assert parts[1].seeds == [0, 1]
    unreadable = replace(run, config_text="clients = -1")
    assert unreadable.at(run.points[1]).config["topology"]["p"] == 0.9


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
    half = [trial.changed(finished=trial.seed == 1) for trial in run.trials]
    mine = [line for line in run.metrics if line["algorithm"] == "dfca-gi" and line["seed"] == 1]
    partly = curve_of(replace(run, trials=half), "dfca-gi", "accuracy")
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
    heights = move_apart([0.1, 0.5, 0.51, 0.99, 1.0], 0.06)
    assert np.diff(heights).min() >= 0.06 - 1e-12
    assert heights[0] == pytest.approx(0.1, abs=0.06)
    assert max(heights) <= 1 + 1e-12
    assert np.mean(heights[1:3]) == pytest.approx(0.505, abs=0.06)


def test_an_algorithm_looks_the_same_whatever_else_is_drawn() -> None:
    few = plots.styles(["ifca"])
    many = plots.styles(["mine", "ifca", "yours"])
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
    style = {name: Style("#000000", "-") for name in names}
    curves = {name: ScoreCurve([1.0, 2.0], [0.1 * i, 0.5]) for i, name in enumerate(names)}
    for figure in (
        plots.draw_curves(curves, style, "accuracy"),
        plots.draw_bars(dict.fromkeys(names, 1.0), style, "MB", dict.fromkeys(names, "1")),
    ):
        assert all(f">{name}<" in svg.to_svg(figure) for name in names)
        assert [path.suffix for path in svg.save(figure, tmp_path / "figure")] == [".png", ".svg", ".pdf"]


def test_no_axis_cuts_a_line_off_and_an_outlier_gets_a_closer_look() -> None:
    lines = {"dfca-auto": [0.5, 0.92], "ifca": [0.4, 0.9], "local": [0.6, 0.88], "lost": [0.1, 0.2]}
    series = {name: ScoreCurve([5, 10], mean) for name, mean in lines.items()}
    style = plots.styles(series)
    low, high = plots.draw_curves(series, style, "accuracy (%)").axes[0].get_ylim()
    assert low <= 10
    assert high >= 92
    zoom = zoom_of(series)
    assert zoom is not None
    assert zoom.outside == ("lost",)
    closer = plots.draw_curves(series, style, "accuracy (%)", zoom=zoom)
    assert closer.axes[0].get_ylim() == (zoom.low, zoom.high)
    names = {text.get_text() for text in closer.axes[0].texts}
    assert names == {"dfca-auto", "ifca", "local"}
    drawn = [line for line in closer.axes[0].lines if line.get_transform() == closer.axes[0].transData]
    assert {line.get_color() for line in drawn} == {style[name].colour for name in names}, "one that is left out"
    assert all(line.get_clip_on() for line in drawn), "a dot below the axis lies over the text of the page"


def test_long_names_of_bars_stay_inside_the_figure() -> None:
    names = ["dfca-auto", "dfedavgm + last step", "a.long.module:with_a_long_function"]
    figure = plots.draw_bars(dict.fromkeys(names, 1.0), plots.styles(names), "MB", dict.fromkeys(names, "1,234"))
    FigureCanvasAgg(figure).draw()
    texts = [*figure.axes[0].get_yticklabels(), *figure.axes[0].texts]
    assert all(text.get_window_extent().x0 >= 0 for text in texts)
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)


def test_flat_lines_need_no_closer_look() -> None:
    means = {"a": 1.0, "b": 1.0, "lost": 0.5}
    assert zoom_of({name: ScoreCurve([1, 2], [mean, mean]) for name, mean in means.items()}) is None


def test_lines_that_end_close_together_need_no_closer_look() -> None:
    means = {"a": 0.95, "b": 0.94, "c": 0.91, "d": 0.905}
    assert zoom_of({name: ScoreCurve([1, 2], [0.1, mean]) for name, mean in means.items()}) is None


def test_the_labels_of_lines_never_overlap_also_where_lines_stop_early() -> None:
    series = {f"own {i}": ScoreCurve([1, 2 + i % 3], [0.5, 0.9]) for i in range(8)}
    axes = plots.draw_curves(series, plots.styles(series), "accuracy (%)").axes[0]
    places = sorted(text.get_position()[1] for text in axes.texts)
    assert len(places) == 8
    assert np.diff(places).min() >= 0.055


def test_the_page_lists_what_the_command_line_changed(tmp_path: Path, run_folder: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["changes"] = [{"key": "topology.p", "value": 0.4, "instead_of": 0.3}]
    (folder / "summary.json").write_text(json.dumps(summary))
    page = write_report(folder).read_text()
    assert "<code>topology.p</code> 0.4 (instead of 0.3)" in page


def test_the_page_describes_an_algorithm_with_options_by_these(run_folder: Path) -> None:
    config = {"algorithm": {"dfca-auto, plain": {"momentum": 0.0, "personal": {"steps": 0}}, "dfca-fi": {"support": 3}}}
    run = replace(load_run(run_folder), config=config)
    assert about_algorithm(run, "dfca-auto, plain") == "dfca-auto with momentum 0.0, personal steps 0."
    assert about_algorithm(run, "dfca-auto").startswith("Ours, recommended: ")
    assert about_algorithm(run, "dfca-fi").endswith(". Here with support 3.")
    assert about_algorithm(run, "mine:mine") == "Not one of dfca's own algorithms."


def test_a_sweep_in_short() -> None:
    def trials(rate: int, algorithm: str, accuracy: float) -> list[dict[str, Any]]:
        lost = [2, 2, 1 if algorithm == "b" else 2]
        return [
            row(algorithm, seed, accuracy, models=2, live_clusters=live, digest=f"rate={rate}")
            for seed, live in enumerate(lost)
        ]

    points = [point({"rate": rate}, algorithms=["a", "b", "ifca"]) for rate in (1, 2)]
    runs = [*trials(1, "a", 0.5), *trials(1, "b", 0.6), *trials(2, "a", 0.9), *trials(2, "b", 0.8)]
    report = report_of({"points": points, "runs": [*runs, *trials(2, "ifca", 0.99)]})
    told = findings.sweep_findings(report.rows, ["rate"])
    assert (told["winner"].algorithm, told["winner"].label) == ("a", "rate=2"), "a server is no rival"
    assert sorted(told["wins"]) == [("a", 1), ("b", 1)]
    assert told["effects"] == [findings.Effect("rate", "2", pytest.approx(0.85), "1", pytest.approx(0.55), 2)]
    assert told["missed"] == [("b", 2, 6)]


def test_columns_are_chosen_by_name_in_every_format() -> None:
    report = report_of(SUMMARY)
    options = formats.TableOptions(columns=["right-cluster", "accuracy"])
    head = formats.markdown(report, options).splitlines()[0]
    assert head == "| algorithm | right cluster % | accuracy % |"
    with pytest.raises(ConfigError, match=r'unknown column "bogus". Known: .*accuracy %'):
        formats.markdown(report, formats.TableOptions(columns=["bogus"]))
    numbers = formats.comma_separated(report, formats.TableOptions(columns=["accuracy_mean"]))
    assert numbers.splitlines()[0] == "algorithm,accuracy_mean"
    titles = [table.title for table in formats.all_tables(report_of(ONE_KEY), None, formats.TableOptions(["accuracy"]))]
    assert titles == ["accuracy %"]


def test_a_latex_table_with_a_caption_is_a_float_of_one_column_or_two() -> None:
    report = report_of(SUMMARY).with_paper_names()
    narrow = formats.latex(report, formats.TableOptions(["accuracy"], "Ours & theirs"))
    assert narrow.startswith("\\begin{table}[t]\n")
    assert r"\caption{Ours \& theirs}" in narrow
    assert r"\shortstack[r]{accuracy \\ \%}" in narrow
    assert "DFCA-GI & " in narrow
    assert "dfca-gi" not in narrow
    assert "\\begin{table*}[t]\n" in formats.latex(report, formats.TableOptions(caption="All"))


def test_columns_for_which_there_is_no_room_are_named_and_bold_is_explained_where_it_is() -> None:
    report = report_of(SUMMARY)
    tables_shown = formats.all_tables(report, 60)
    assert formats.narrow_note(tables_shown).startswith("no room for: talks to, ")
    assert formats.narrow_note(formats.all_tables(report)) == ""
    assert any("bold:" in line for line in formats.all_notes(report, formats.all_tables(report)))
    without = formats.all_tables(report, None, formats.TableOptions(["runs"]))
    assert not any("bold:" in line for line in formats.all_notes(report, without))


def test_figures_have_the_width_and_the_letters_that_print_asks_for(tmp_path: Path) -> None:
    series = {"dfca-gi": ScoreCurve([1, 2], [0.5, 0.7]), "local": ScoreCurve([1, 2], [0.4, 0.5])}
    size = FigureSize(3.4, 8)
    with sized(size):
        figure = plots.draw_curves(series, plots.styles(series), "accuracy (%)")
    png, drawn, _ = svg.save(figure, tmp_path / "figure", size, paper_names=True)
    width = int.from_bytes(png.read_bytes()[16:20], "big")
    assert width == 3.4 * 200
    assert {text.get_fontsize() for text in figure.axes[0].texts} == {8}
    assert ">DFCA-GI<" in drawn.read_text()
    with pytest.raises(ConfigError, match="no room for letters of 20 points; use at most 7"), sized(FigureSize(2, 20)):
        pass


def test_the_score_is_drawn_against_traffic(run_folder: Path) -> None:
    drawn = figures.traffic_drawing(load_run(run_folder))
    assert drawn is not None
    assert drawn.name == "accuracy-by-traffic"
    assert drawn.figure.axes[0].get_xlabel() == "MB per client"
    assert "sends nothing: local" in drawn.caption


def test_what_a_sweep_compares_is_in_one_axis(sweep_folder: Path) -> None:
    run = load_run(sweep_folder)
    style = plots.styles(run.algorithms)
    (accuracy, *_) = by_round_figures(run, style)
    names = {text.get_text() for text in accuracy.figure.axes[0].texts}
    assert {"dfca-gi, 0.1", "dfca-gi, 0.9", "dfca-li, 0.1", "dfca-li, 0.9"} <= names
    curve = ScoreCurve([1, 2], [0.1, 0.2])
    merged = in_one_axis(
        [("mixing.weights=uniform", {"dfca-gi": curve}), ("mixing.weights=samples", {"dfca-gi": curve})], style
    )
    assert merged is not None
    assert list(merged[0]) == ["uniform", "samples"], "one algorithm is not named"
    assert len({own.colour for own in merged[1].values()}) == 2
    assert (
        in_one_axis([(f"a={i}", dict.fromkeys("bcd", curve)) for i in range(3)], dict.fromkeys("bcd", Style("", "-")))
        is None
    )
    page = write_report(shutil.copytree(sweep_folder, sweep_folder.parent / "one-axis", dirs_exist_ok=True)).read_text()
    assert "What a client sent and received in the whole run" in page
    assert page.count("beyond chance") <= 2, "once in short, once among the words"


def test_a_key_that_changes_nothing_is_noted_and_one_algorithm_is_no_average() -> None:
    points = [point({"rate": rate}, algorithms=["a"]) for rate in (1, 2)]
    same = [row("a", seed, 0.5 + seed / 10, models=1, digest=f"rate={rate}") for rate in (1, 2) for seed in (0, 1)]
    report = report_of({"points": points, "runs": same})
    assert findings.sweep_findings(report.rows, ["rate"])["idle"] == ["rate"]
    assert "rate changes nothing: scores and traffic are the same at all its values" in tables.notes(report)
    other = [*same[:3], row("a", 1, 0.9, models=1, digest="rate=2")]
    short = findings.sweep_findings(report_of({"points": points, "runs": other}).rows, ["rate"])
    assert (short["idle"], short["effects"][0].algorithms) == ([], 1)  # type: ignore[index]


def test_a_closer_look_that_shows_the_same_again_is_left_out() -> None:
    lines = {"a": [0.1, 0.92], "b": [0.12, 0.91], "c": [0.11, 0.9], "low": [0.1, 0.3]}
    assert zoom_of({name: ScoreCurve([5, 10], mean) for name, mean in lines.items()}) is None


def test_nothing_is_drawn_before_there_are_models() -> None:
    before = EvaluationRow.of({"round": 0, "accuracy": 0.0, "assignments": [0, 0], "without_models": [0, 1]})
    assert known_value(before, "accuracy") is None
    assert known_value(EvaluationRow.of({**before, "without_models": [1]}), "accuracy") == 0.0


def test_figures_of_one_run_are_of_one_height_beside_each_other() -> None:
    lines = {"dfca-gi": ScoreCurve([1, 2], [0.5, 0.7]), "a method of a long name": ScoreCurve([1, 2], [0.4, 0.5])}
    style = plots.styles(lines)
    both = plots.draw_curves(lines, style, "accuracy (%)")
    one = plots.draw_curves({"dfca-gi": lines["dfca-gi"]}, style, "accuracy (%)")
    bars = plots.draw_bars(dict.fromkeys(lines, 1.0), style, "MB", dict.fromkeys(lines, "1"))
    sizes = {tuple(figure.get_size_inches().tolist()) for figure in (both, one, bars)}
    assert len(sizes) == 1
