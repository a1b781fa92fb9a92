"""What the report shows beyond accuracy: the lemmas, the clusters' graphs, figures as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dfca.base.errors import RunError
from dfca.experiment.load import load_experiment
from dfca.report import formats
from dfca.report.drawing import svg
from dfca.report.page import write_report
from dfca.report.paper import theory
from dfca.report.paper.connectivity import FACTS, graph_key, shares
from dfca.report.paper.figures import draw_all, save_figures
from dfca.report.results import save_results, stored_run
from dfca.report.rows import RunReport
from dfca.runs.runner import run
from dfca.runs.store.reading import Run, load_run
from dfca.runs.store.rows import History, cluster_facts, histories
from dfca.sim.metrics_table import EvaluationRow

KINDS = ("png", "svg", "pdf")


@pytest.fixture(scope="module")
def measured(theory_folder: Path) -> Run:
    return load_run(theory_folder)


@pytest.fixture(scope="module")
def sparse(sweep_folder: Path) -> Run:
    return load_run(sweep_folder)


def test_induced_graphs_by_hand() -> None:
    # A path 0-1-2-3 with clusters a b a a: 2-3 are together, 0 has nobody of a beside it, 1 is b alone.
    facts = cluster_facts(4, [(0, 1), (1, 2), (2, 3)], [0, 1, 0, 0])
    assert facts == {"clusters": 2, "connected_clusters": 1, "alone": 2, "largest_part": 3}


def test_a_history_is_a_list_by_round_and_of_clusters_the_mean() -> None:
    lines = [
        {"algorithm": "dfca-gi", "seed": 0, "round": t, "accuracy": t / 10, "disagreement": [t, 3 * t]} for t in (1, 2)
    ]
    (history,) = histories(map(EvaluationRow.of, lines))
    stored = {"algorithm": "dfca-gi", "seed": 0, "round": [1, 2], "accuracy": [0.1, 0.2], "disagreement": [2.0, 4.0]}
    assert history.stored() == stored
    assert History.of(stored) == history


def test_metropolis_contracts_within_the_bound_and_keeps_the_average(measured: Run) -> None:
    rows = theory.mixing(measured)
    whole = [row for row in rows if row.models == 1]
    assert len(whole) == 8
    for row in whole:
        if row.point["mixing.weights"] == "metropolis":
            assert row.within == len(row.worst) == 1
            assert row.drift < 1e-5
    assert any(row.drift > 0.01 for row in whole if row.point["mixing.weights"] == "uniform")


def test_the_assignment_never_raises_f_global(measured: Run) -> None:
    rows = theory.descents(measured)
    assert {row.algorithm for row in rows} == {"dfca-gi", "dfca-li"}
    assert all(row.raised == 0 and row.rounds == 4 for row in rows)


def test_the_lemmas_in_every_format_and_from_a_saved_file(measured: Run, tmp_path: Path) -> None:
    save_results(RunReport.of(measured), tmp_path / "theory.json")
    again = RunReport.of(stored_run(tmp_path / "theory.json"))
    assert formats.markdown(again) == formats.markdown(RunReport.of(measured))
    for text in (formats.markdown(again), (measured.folder / "report.html").read_text()):
        assert "within the bound" in " ".join(text.split())
        assert "drift of the average" in " ".join(text.split())
    assert r"$\lambda$" in formats.latex(again)
    assert "<h2>Theory and measurement</h2>" in (measured.folder / "report.html").read_text()


def test_where_the_graphs_of_the_clusters_fall_apart(sparse: Run) -> None:
    assert graph_key(sparse) == "topology.p"
    by_name = {fact.name: shares(sparse, fact) for fact in FACTS}
    assert by_name["connected"][0.1] < by_name["connected"][0.9] == 1
    assert by_name["alone"][0.1] > by_name["alone"][0.9] == 0
    page = (sparse.folder / "report.html").read_text()
    assert "Where clusters fall apart" in page
    assert "clusters connected among themselves" in " ".join(formats.markdown(RunReport.of(sparse)).split())


def test_figures_of_a_run_are_files_of_three_kinds_with_the_same_bytes(run_folder: Path, tmp_path: Path) -> None:
    names = ["accuracy-by-round", "cluster-accuracy-by-round", "accuracy-by-traffic", "graph", "confusion", "samples"]
    drawn, again = list(draw_all(load_run(run_folder))), list(draw_all(load_run(run_folder)))
    assert [drawing.name for drawing in drawn] == names
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for place in (0, 2):  # a curve, and one with dots and links
        first = svg.save(drawn[place].figure, tmp_path / "a" / names[place])
        second = svg.save(again[place].figure, tmp_path / "b" / names[place])
        assert [path.name for path in first] == [f"{names[place]}.{kind}" for kind in KINDS]
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_page_of_clients_that_all_hold_the_same(tmp_path: Path) -> None:
    small = ["clients=6", "data.distributions=1", "data.samples_per_client=20", "model.hidden=4", "rounds=2"]
    run(load_experiment("quickstart", None, small, ["dfca-gi"], seeds=1), tmp_path / "run", workers=1)
    assert "accuracy" in write_report(tmp_path / "run").read_text()


def test_figures_of_a_sweep(sparse: Run) -> None:
    names = {drawing.name for drawing in draw_all(sparse)}
    assert names >= {"accuracy-against-topology.p", "graphs-against-topology.p", "samples"}
    assert "accuracy-by-round-topology.p-0.1" in names


def test_figures_also_from_a_file_of_results(measured: Run, sparse: Run, tmp_path: Path) -> None:
    save_results(RunReport.of(measured), tmp_path / "theory.json")
    made = save_figures(stored_run(tmp_path / "theory.json"), tmp_path / "figures")
    names = ("contraction", "drift", "samples")
    assert sorted(path.name for path in made) == sorted(f"{name}.{kind}" for name in names for kind in KINDS)
    save_results(RunReport.of(sparse), tmp_path / "sparse.json")
    kept = [drawing.name for drawing in draw_all(stored_run(tmp_path / "sparse.json"))]
    assert "accuracy-by-round-topology.p-0.1" in kept


def test_a_folder_that_cannot_be_written_is_told(sparse: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        save_figures(sparse, tmp_path / "file")
