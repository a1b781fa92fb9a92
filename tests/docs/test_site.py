"""The docs site, as far as it can be checked without its libraries: `make site` builds it with `--strict`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dfca.contracts
import dfca.testing

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "mkdocs.yml").read_text()
HOOK = (ROOT / "docs" / "site_pages.py").read_text()
MADE = {"index.md": "README.md", "design.md": "DESIGN.md", "contributing.md": "CONTRIBUTING.md"}
MADE |= {"maintainers.md": "MAINTAINERS.md", "security-policy.md": "SECURITY.md", "conduct.md": "CODE_OF_CONDUCT.md"}
MADE |= {"changelog.md": "CHANGELOG.md", "api.md": "src/dfca/__init__.py", "keys.md": "docs/experiments.md"}


def test_the_navigation_names_every_page_and_no_other() -> None:
    (navigation,) = re.findall(r"^nav:\n(.*?)^\S", SETTINGS, re.DOTALL | re.MULTILINE)
    named = re.findall(r"[\w-]+\.md$", navigation, re.MULTILINE)
    assert len(named) == len(set(named))
    notebooks = {f"{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert len(notebooks) == 4
    assert set(named) == {path.name for path in (ROOT / "docs").glob("*.md")} | set(MADE) | notebooks
    for page, source in MADE.items():
        assert page in HOOK
        assert Path(source).name in HOOK
        assert (ROOT / source).exists()


def test_files_that_the_settings_name_exist() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"docs/\w+\.py", SETTINGS))
    (styles,) = re.findall(r"^extra_css: \[(.*)\]$", SETTINGS, re.MULTILINE)
    assert all((ROOT / "docs" / name).exists() for name in styles.split(", "))


def test_nothing_is_loaded_from_elsewhere() -> None:
    style = (ROOT / "docs" / "site.css").read_text()
    assert "font: false" in SETTINGS
    assert "://" not in SETTINGS + style
    # The plugin for search from files would load a script from elsewhere; ours takes its place.
    assert re.search(r"^  polyfills: \[iframe-worker\.js\]", SETTINGS, re.MULTILINE)
    assert "http" not in (ROOT / "docs" / "iframe-worker.js").read_text()


def test_the_page_of_the_api_groups_every_public_name() -> None:
    (groups,) = re.findall(r"^GROUPS = \{\n(.*?)^\}", HOOK, re.DOTALL | re.MULTILINE)
    named = [name for members in re.findall(r"\(([^)]*)\)", groups) for name in re.findall(r'"(\w+)"', members)]
    assert sorted(named) == sorted(set(dfca.__all__) - {"__version__"})
    for module in (dfca.contracts, dfca.testing):
        shown = {name for name in module.__all__ if callable(getattr(module, name))}
        assert set(re.findall(rf'"{module.__name__.removeprefix("dfca.")}\.(\w+)"', HOOK)) == shown


def test_the_libraries_of_the_site_are_pinned_and_no_part_of_the_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[\[>]", need)[0] for need in extras["site"]}
    assert names <= pinned
    assert not names & {re.split(r"[\[>]", need)[0] for need in extras["dev"]}
    assert not re.search(r"dfca\[[^\]]*site", extras["dev"][0])


def test_links_between_documents_lead_somewhere() -> None:
    """Relative links and their anchors, as a code host resolves them; the hook rewrites them for the site."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            place = path.parent / target if target else path
            assert place.exists(), (path.name, target)
            if anchor:
                heads = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, anchor


def test_link_texts_are_titles_not_file_names() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        if path.name != "CHANGELOG.md":
            text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
            texts = re.findall(r"\[([^\]]+)\]\([^)]*\.md[^)]*\)", text)
            assert [said for said in texts if said.endswith(".md")] == [], path.name
