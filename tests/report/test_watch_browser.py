"""The live page in a real browser: it follows a run in progress, loads from this machine alone, and fits a phone."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium
from watch_folder import CONFIG, Folder

from dfca.experiment.load import load_experiment
from dfca.experiment.sweep import Trial
from dfca.runs.runner import run
from dfca.runs.sink import NullSink
from dfca.sim.metrics_table import EvaluationRow
from dfca.watch.hub import Hub
from dfca.watch.run_source import RunSource
from dfca.watch.server import PageServer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")
NASTY = '<img src=x onerror="document.title=1">'
SHOWN = "window.dfca.details.frames.length ? window.dfca.details.frames.at(-1).round : 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


@contextmanager
def served(folder: Path) -> Iterator[PageServer]:
    with PageServer(Hub(RunSource(folder))) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.05))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Check(NullSink):
    """Wait after every evaluation until the page shows it: the run continues meanwhile."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check = check

    def finish_round(self, trial: Trial, round: int, metrics: EvaluationRow | None, time_s: float = 0.0) -> None:
        if metrics is not None:
            self._check(round)


def test_the_page_follows_a_run(browser: Chromium, tmp_path: Path) -> None:
    changes = ("rounds=6", "evaluation.every=2", "clients=8", "data.samples_per_client=20", "model.hidden=4")
    experiment = load_experiment("quickstart", None, changes, ["dfca-auto", "ifca"], [0])
    seen: list[int] = []
    home = ""
    browser.requests.clear()
    browser.errors.clear()
    with ExitStack() as stack:

        def check(round_: int) -> None:
            nonlocal home
            if not home:
                home = stack.enter_context(served(tmp_path / "run")).url
                browser.open(home)
            browser.wait_for(f"({SHOWN}) === {round_}")
            seen.append(round_)

        run(experiment, tmp_path / "run", Check(check))
        browser.wait_for("document.getElementById('state').textContent.startsWith('finished')")
        assert seen == [2, 4, 6, 2, 4, 6]
        assert browser.run("document.querySelectorAll('.client').length") == 8
        assert "2 of 2 trials finished" in browser.run("document.getElementById('state').textContent")
        names = browser.run("[...document.querySelectorAll('#score .name')].map(each => each.textContent).sort()")
        assert names == ["dfca-auto", "ifca"]
    assert browser.errors == []
    assert browser.requests
    assert [url for url in browser.requests if not url.startswith((home, "data:,"))] == []


def test_switches_alarms_and_names_from_a_folder(browser: Chromium, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", CONFIG.replace("Toy", NASTY.replace('"', '\\"')))
    folder.append(5, [0, 0, 1, 1])
    folder.append(5, [0, 0, 1, 1], NASTY.replace("/", ""))
    browser.errors.clear()
    with served(folder.path) as server:
        browser.open(server.url)
        browser.wait_for(f"({SHOWN}) === 5")
        assert browser.run("document.getElementById('title').textContent") == NASTY
        assert browser.run("document.querySelectorAll('img').length") == 0
        folder.append(10, [0, 0, 0, 0], away=1, away_clients=[3])
        browser.wait_for("document.querySelectorAll('.switched').length === 2")
        assert "only 1 of 2 clusters" in browser.run("document.getElementById('alarms').textContent")
        assert "2 clients switched: 2 (1→0), 3 (1→0)" in browser.run("document.getElementById('log').textContent")
        assert browser.run("document.querySelectorAll('.client.away').length") == 1
        browser.run("document.getElementById('back').click()")
        browser.wait_for("document.getElementById('when').textContent === 'round 5'")
        assert browser.run("document.querySelectorAll('.client.away').length") == 0
        browser.run("document.getElementById('live').click()")
        browser.run("document.getElementById('graph').focus()")
        browser.key("ArrowRight")
        browser.wait_for(
            "document.getElementById('client').textContent.startsWith('client 0: cluster 0, true group 0')"
        )
        browser.run("document.getElementById('score').focus()")
        browser.key("ArrowRight")
        browser.wait_for("document.getElementById('tip').textContent.startsWith('round 5')")
        (folder.path / "summary.json").write_text("{")
        browser.wait_for("document.getElementById('problems').textContent.includes('summary.json is damaged')")
    browser.wait_for("document.getElementById('state').textContent.startsWith('no connection')")
    assert [error for error in browser.errors if "ERR_" not in error and "Failed to load" not in error] == []


def test_it_fits_a_phone_and_the_dark(browser: Chromium, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    for round_ in range(5, 25, 5):
        folder.append(
            round_, [0, 0, 1, 1], accuracy_by_cluster=[0.9, 0.8], away=1, away_clients=[2], folds=round_, fold_ages=3
        )
    with served(folder.path) as server:
        browser.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
        browser.open(server.url)
        browser.wait_for(f"({SHOWN}) === 20")
        assert browser.run("document.documentElement.scrollWidth") <= 500
        colours = []
        for scheme in ("light", "dark"):
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            colours.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        assert colours == ["rgb(255, 255, 255)", "rgb(22, 24, 27)"]


def test_the_names_of_many_lines_neither_overlap_nor_leave_their_chart(browser: Chromium, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    for number in range(12):
        for round_ in (5, 10):
            folder.append(round_, [0, 0, 1, 1], f"algorithm {number} + a last step", cluster_accuracy=1.0)
    find = "[...document.querySelectorAll('svg')].filter(each => each.querySelectorAll('.name').length === 12)"
    boxes = "[...each.querySelectorAll('.name')].map(name => name.getBoundingClientRect())"
    with served(folder.path) as server:
        for width in (1280, 500):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
            )
            browser.open(server.url)
            browser.wait_for(f"{find}.length > 3")
            right = browser.run(
                f"{find}.map(each => [each.getBoundingClientRect().right, {boxes}.map(box => box.right)])"
            )
            assert all(max(names) <= edge for edge, names in right)
            tops = browser.run(f"{find}.map(each => {boxes}.map(box => box.top))")
            assert all(b - a > 11 for top in tops for a, b in itertools.pairwise(sorted(top)))


@pytest.mark.slow
def test_a_new_line_is_on_the_page_within_two_seconds(browser: Chromium, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.append(1, [0, 0, 1, 1])
    delays = []
    with served(folder.path) as server:
        browser.open(server.url)
        browser.wait_for(f"({SHOWN}) === 1")
        time.sleep(6)  # what loads late has loaded
        for round_ in range(2, 27):
            time.sleep(0.137 * (round_ % 7))  # at any moment between two looks
            began = time.time()
            folder.append(round_, [0, 0, 1, round_ % 2])
            browser.wait_for(f"document.getElementById('when').textContent === 'round {round_}'")
            delays.append(browser.run("window.dfca.details.arrived") - began)
    print(f"appended to drawn: median {statistics.median(delays):.2f} s, most {max(delays):.2f} s of {len(delays)}")
    assert max(delays) < 2


def test_a_seed_that_begins_does_not_cut_the_mean_of_the_others_short(browser: Chromium, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.append(1, [0, 0, 1, 1])
    with served(folder.path) as server:
        browser.open(server.url)
        browser.wait_for(f"{SHOWN} === 1")
        curves = "{x: [1, 10, 20], y: [.5, .7, .9], finished: %s}, {x: [1], y: [.2], finished: false}"
        for finished in ("true", "false"):
            script = f"import('./charts.js').then(charts => charts.meanCurve([{curves % finished}]))"
            mean = browser.run(f"({script}).then(mean => JSON.stringify([mean.x, mean.y]))")
            assert mean == "[[1,10,20],[0.5,0.7,0.9]]"
    page = (Path(__file__).parents[2] / "src/dfca/watch/page/main.js").read_text()
    assert '"no evaluation of this point yet"' in page
