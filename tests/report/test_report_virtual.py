"""Runs in virtual time as tables, figures and pages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from metric_lines import put_metrics
from reports import report_of
from tiny_worlds import TINY
from toy import run_virtual

from dfca.experiment.sweep import Sweep
from dfca.report.drawing.curves import ScoreCurve
from dfca.report.drawing.svg import to_svg
from dfca.report.formats import all_tables
from dfca.report.page import write_report
from dfca.report.results import run_of, save_results, stored_run
from dfca.report.virtual.figures import virtual_drawings
from dfca.report.virtual.plots import Mark, draw_courses, styles_of
from dfca.report.virtual.summary import VirtualResults, axis_of, variant_of
from dfca.report.virtual.tables import ratio_to_batch, virtual_tables
from dfca.runs.store.reading import Run, load_run
from dfca.runs.store.rows import TrialRow


def row(aggregation: str, slowdown: int, time_s: float | None, algorithm: str = "dfca-gi") -> TrialRow:
    at = {"mixing.aggregation": aggregation, "world.compute.slowdown": slowdown}
    values = {"algorithm": algorithm, "seed": 0, "point": at, "time_to_target_s": time_s, "time_s": 100.0}
    return TrialRow.of(values)


def swept(*points: dict[str, Any]) -> Run:
    return run_of({"points": [{"point": at, "world": {}} for at in points], "runs": []})


def test_ratios_to_batch_by_hand() -> None:
    rows = [row("sequential", 10, 8.0), row("batch", 10, 40.0), row("batch", 1, 10.0), row("batch", 20, None)]
    assert ratio_to_batch(rows, rows[:1]) == (5.0, False)
    assert ratio_to_batch(rows, [row("sequential", 20, 10.0)]) == (10.0, True)  # at least: batch never got there
    assert ratio_to_batch(rows, [row("sequential", 10, None)]) is None
    assert ratio_to_batch(rows, rows[1:2]) is None
    axis = axis_of(swept(*(dict(trial.point) for trial in rows)))
    assert axis == ("world.compute.slowdown", [1.0, 10.0, 20.0])
    assert axis_of(swept({"world.partitions": []}, {})) == ("", [0.0])
    assert variant_of(rows[0], axis) == "dfca-gi sequential"
    other = {"algorithm": "dfca-auto", "seed": 0, "point": {"world.partitions": [], "world.churn.keeps": False}}
    assert variant_of(TrialRow.of(other), axis) == "dfca-auto no partitions not keeps"
    assert variant_of(row("batch", 1, 1.0, "ifca"), axis) == "ifca"


def test_the_table_in_virtual_time(virtual_folder: Path) -> None:
    report = report_of(virtual_folder)
    (table,) = virtual_tables(report.run)
    assert table.title == "In virtual time"
    assert [" ".join(title.split()) for title in table.columns] == [
        "world. compute. slowdown",
        "what",
        "12 % after virtual s",
        "times sooner than batch",
        "MB per client to 12 %",
        "trained s per client",
        "idle %",
        "age of models",
        "rounds of a client",
        "joiners at 95 % after s",
    ]
    assert [(line[0].text, line[1].text) for line in table.rows] == [
        ("1", "dfca-gi sequential"),
        ("", "dfca-gi batch"),
        ("", "ifca"),
        ("5", "dfca-gi sequential"),
        ("", "dfca-gi batch"),
        ("", "ifca"),
    ]
    assert [continues for _, _, continues in table.lines] == [False, True, True] * 2
    assert all_tables(report)[-1] == table
    narrow = all_tables(report, width=90)[-1]
    assert narrow.width <= 90
    assert "rounds of\na client" not in narrow.columns
    assert all(len(line) == len(narrow.columns) == len(narrow.words) for line in narrow.rows)


def test_the_page_has_every_picture_and_so_has_the_folder(virtual_folder: Path) -> None:
    page = (virtual_folder / "report.html").read_text()
    for heading in (
        "In short",
        "Over virtual time",
        "Against world.compute.slowdown",
        "Late joiners",
        "Ages of models",
        "Timelines",
    ):
        assert f"<h2>{heading}</h2>" in page
    names = {path.stem for path in (virtual_folder / "figures").glob("*.svg")}
    assert {"time-1", "time-5", "traffic-5", "accuracy-by-slowdown", "idle-by-slowdown", "ages"} < names
    assert {"timeline-dfca-gi-sequential", "timeline-dfca-gi-batch", "timeline-ifca"} < names
    assert "joiners-dfca-gi-sequential" in names
    assert page.count("<svg") == len(names)
    for path in (virtual_folder / "figures").glob("*.svg"):
        text = path.read_text()
        assert "currentColor" not in text
        assert 'xmlns="http://www.w3.org/2000/svg"' in text


def test_the_page_of_a_sweep_is_short_and_begins_with_the_best(virtual_folder: Path) -> None:
    page = (virtual_folder / "report.html").read_text()
    (short,) = re.findall(r'<ul class="findings">(.*?)</ul>', page, re.DOTALL)
    lines = re.findall(r"<li>(.*?)</li>", short, re.DOTALL)
    assert len(lines) <= 4, "no line for each variant"
    (best,) = (line for line in lines if line.startswith("Best in the end at world.compute.slowdown = 5: <b>"))
    assert "; worst: " in best
    assert page.count("<figure") <= 16


def test_a_page_of_one_point(virtual_point_folder: Path) -> None:
    page = (virtual_point_folder / "report.html").read_text()
    assert "Against" not in page
    assert "<dt>virtual time</dt>" in page
    assert {path.stem for path in (virtual_point_folder / "figures").glob("*.svg")} == {
        "time",
        "traffic",
        "ages",
        "joiners-dfca-gi",
        "timeline-dfca-gi",
    }


def test_a_file_of_results_gives_the_same_pictures(virtual_point_folder: Path, tmp_path: Path) -> None:
    report = report_of(virtual_point_folder)
    save_results(report, tmp_path / "kept.json")
    kept = report_of(tmp_path / "kept.json")

    def pictures(results: VirtualResults) -> list[tuple[str, ...]]:
        drawn = [drawing for section in virtual_drawings(results).values() for drawing in section]
        return [(drawing.name, drawing.caption, drawing.title, to_svg(drawing.figure)) for drawing in drawn]

    assert pictures(VirtualResults.of(kept.run)) == pictures(VirtualResults.of(report.run))
    assert all_tables(kept)[-1] == all_tables(report)[-1]


def test_a_file_of_a_sweep_keeps_the_timelines_that_are_drawn(virtual_folder: Path, tmp_path: Path) -> None:
    report = report_of(virtual_folder)
    save_results(report, tmp_path / "kept.json")
    whole, kept = VirtualResults.of(report.run), VirtualResults.of(stored_run(tmp_path / "kept.json"))
    assert kept.courses == whole.courses
    assert {table.point["world.compute.slowdown"] for table in kept.timelines} == {5}
    assert len(kept.timelines) == len(whole.timelines) // 2


def test_a_run_in_virtual_time_that_has_only_begun(virtual_point_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(virtual_point_folder, out)
    shutil.rmtree(out / "timeline")
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps(summary | {"runs": []}))
    page = write_report(out).read_text()
    assert "This run is not finished" in page
    put_metrics(out, "")
    assert "No round has been evaluated yet" in write_report(out).read_text()


def test_a_sweep_whose_points_have_a_world_or_none(tmp_path: Path) -> None:
    """A point without a world runs in rounds; the page shows the others in virtual time."""
    values = {key: value for key, value in TINY.items() if key not in ("world", "clock")} | {"rounds": 2}
    worlds = [{"world.preset": "ideal", "world.link.latency_s": latency_s} for latency_s in (0.1, 0.2)]
    sweep = Sweep.of({"points": [{"local.learning_rate": 0.1}, *worlds]})
    run_virtual(tmp_path, values, sweep)
    run = load_run(tmp_path)
    assert ["time_s" in trial for trial in run.trials] == [False, True, True]
    assert axis_of(run) == ("world.link.latency_s", [0.1, 0.2])
    page = (tmp_path / "report.html").read_text()
    assert "latency 0.1 s (at the first point with one; the points without a world ran in rounds)" in page
    assert "Over virtual time" in page
    assert "Against world.link.latency_s" in page


def test_the_text_of_a_mark_is_inside_the_picture() -> None:
    curves = {"dfca-auto": ScoreCurve([0.0, 10.0], [0.2, 0.9])}
    marks = [Mark("apart", begin=2.0, end=6.0), Mark("join", begin=8.0)]
    figure = draw_courses(curves, styles_of(["dfca-auto"]), "virtual time (s)", marks)
    texts = [text for text in figure.axes[0].texts if text.get_text() in ("apart", "join")]
    assert len(texts) == 2
    assert all(text.get_window_extent().y1 <= figure.bbox.y1 for text in texts)
