"""The pages of runs in a real browser: nothing is asked for, nothing is wider than a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium

from dfca.report.page import write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (chromium, chromium-browser or google-chrome)")


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), width=500, dark=True) as made:
        yield made


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("run_folder", "sweep_folder")]


@pytest.mark.parametrize("kind", ["virtual_point_folder", *SLOW])
def test_a_report_fits_a_phone_and_asks_for_nothing(
    kind: str, phone: Chromium, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text(write_report(request.getfixturevalue(kind)).read_text())
    phone.requests.clear()
    phone.open(page.as_uri())
    phone.wait_for("document.readyState === 'complete' && document.querySelectorAll('footer').length === 1")
    assert phone.run("document.documentElement.scrollWidth") <= 500
    assert phone.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    sticky = (
        "[...document.querySelectorAll('table.results td:first-child')].map(each => getComputedStyle(each).position)"
    )
    assert set(phone.run(sticky)) == {"sticky"}
    assert [url for url in phone.requests if not url.startswith(("file:", "data:"))] == []
    assert phone.errors == []
