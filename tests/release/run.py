"""Build what a release uploads, check it as a stranger would, and say what is left to do: `make release`.

    python tests/release/run.py               every extra
    python tests/release/run.py node onnx     these extras only

Into dist go the sdist, the wheel that is built from it, and an SBOM (CycloneDX: what an installation holds).
The wheel is installed into an empty environment of this Python. Every extra is installed into a copy of that
environment; then all names of the package and the extra's modules are imported, and `pip check` must agree.
Versions are those of `constraints.txt`; an extra may replace them, as it does for users, but not torch, which is large.
Of some extras only the packages themselves are installed (`WITHOUT_DEPENDENCIES`); dev and release are left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
# ProFed 0.7 (Python 3.12 or later) asks for torchvision 0.22, which replaces torch by 2.7 and brings gigabytes.
WITHOUT_DEPENDENCIES = ("profed",)
TRY = Path(__file__).with_name("import_all.py")
IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "constraints.txt", "tests/release/run.py")
LEFT = """
Left for a maintainer:
  1. Replace the placeholders: [project.urls] in pyproject.toml, the first table of MAINTAINERS.md.
  2. CHANGELOG.md: rename Unreleased to {version} and the date; version and date in CITATION.cff; commit.
  3. `make test`, `make slow`, `make coverage` on a clean clone; `make release` with each Python of the classifiers.
  4. git tag -s v{version} && git push --tags
  5. twine upload dist/*.whl dist/*.tar.gz, with a token that is valid for this project only; first to the test index.
  6. docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/dfca:{version} --push .
     helm lint charts/dfca-node && helm package charts/dfca-node
  7. Attach dist/sbom.json to the release. Then the next version in src/dfca/__init__.py, a new Unreleased.
"""


def missing_in_wheel(names: Iterable[str], version: str, sources: Iterable[str]) -> set[str]:
    """Return what a wheel lacks: the licence, the mark of types, and any of the package's files."""
    info = f"dfca-{version}.dist-info"
    return {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt", "dfca/py.typed", *sources} - set(names)


def missing_in_sdist(names: Iterable[str], version: str, sources: Iterable[str]) -> set[str]:
    """Return what an sdist lacks: the files that a distributor needs, and any of the package's files."""
    wanted = (*IN_SDIST, *(f"src/{name}" for name in sources))
    return {f"dfca-{version}/{name}" for name in wanted} - set(names)


def package_files() -> list[str]:
    """List the files of the package that git knows, as they are named in a wheel."""
    listed = subprocess.run(["git", "ls-files", "dfca"], cwd=ROOT / "src", check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def extras_of_project() -> dict[str, list[str]]:
    """Read the extras and what they need."""
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return extras


def user_extras() -> list[str]:
    """List the extras that users install."""
    return [extra for extra in extras_of_project() if extra not in ("dev", "release")]


def call(*command: str | Path) -> None:
    """Run a command of the release; the release ends where one fails."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def build() -> tuple[Path, str]:
    """Build the sdist and, from it, the wheel; check both; return the wheel and its version."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as opened, tarfile.open(sdist) as archive:
        missing = missing_in_wheel(opened.namelist(), version, package_files())
        missing |= missing_in_sdist(archive.getnames(), version, package_files())
    if missing:
        raise SystemExit(f"error: not in the wheel or the sdist: {', '.join(sorted(missing))}; is it ignored by git?")
    return wheel, version


def install(wheel: Path, extras: list[str], folder: Path) -> list[str]:
    """Install the wheel and each extra into environments below a folder; return the extras that failed."""
    empty, failed = folder / "empty", []
    call(sys.executable, "-m", "venv", empty)
    python = Path("bin", "python")
    call(empty / python, "-m", "pip", "install", "-q", wheel)
    call(empty / python, TRY)
    (origin,) = empty.glob("lib/*/site-packages/dfca-*.dist-info/direct_url.json")
    origin.unlink()  # a path of this machine, which has no place in the list
    call(sys.executable, "-m", "cyclonedx_py", "environment", "-o", DIST / "sbom.json", empty / python)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (folder / "torch.txt").write_text("".join(f"{pin}\n" for pin in pins if pin.startswith("torch==")))
    os.environ["PIP_CONSTRAINT"] = str(folder / "torch.txt")
    for extra in extras:
        place = folder / extra
        # Files are linked, not copied: pip replaces a file, it never writes into one.
        shutil.copytree(empty, place, symlinks=True, copy_function=os.link)
        try:
            if extra in WITHOUT_DEPENDENCIES:
                call(place / python, "-m", "pip", "install", "-q", "--no-deps", *extras_of_project()[extra])
                continue
            call(place / python, "-m", "pip", "install", "-q", f"{wheel}[{extra}]")
            call(place / python, "-m", "pip", "check")
            call(place / python, TRY, extra)
        except subprocess.CalledProcessError:
            failed.append(extra)
        finally:
            shutil.rmtree(place)
    return failed


def main() -> None:
    """Build, check, install, and print what is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="to install; default: all that users install")
    extras = parser.parse_args().extras or user_extras()
    if unknown := set(extras) - set(user_extras()):
        raise SystemExit(f"error: no extra {', '.join(sorted(unknown))}; there are {', '.join(user_extras())}")
    os.environ.setdefault("PIP_CONSTRAINT", str(ROOT / "constraints.txt"))
    wheel, version = build()
    with tempfile.TemporaryDirectory() as folder:
        failed = install(wheel, extras, Path(folder))
    if failed:
        raise SystemExit(f"error: cannot be installed or imported: {', '.join(failed)}; see above")
    print(f"\nchecked with Python {platform.python_version()}: {wheel.name}, extras {', '.join(extras)}")
    print(LEFT.format(version=version))


if __name__ == "__main__":
    main()
