"""Files of a node that are huge, or no files at all: one sentence at once; neither a hang nor memory."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_swarm import make_swarm, write_samples
from saved_peers import make_saved

from dfca.base.errors import DfcaError
from dfca.base.files import read_small
from dfca.node.disk.folder import NodeFolder
from dfca.node.disk.store import DiskStore
from dfca.node.operate.control import NotRunning, call
from dfca.node.task.config import DataConfig
from dfca.node.task.reading import DataRequest, read

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Fail where something blocks."""

    def late(*_: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 2**30)  # sparse: takes no room


ODD = [make_pipe, make_device_link, make_huge, Path.mkdir]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_swarm(tmp_path_factory.mktemp("odd"), (0,))[0].path


@pytest.mark.parametrize("make", ODD, ids=["pipe", "device", "huge", "folder"])
@pytest.mark.parametrize("name", ["node.toml", "facts.json", "roster.json", "certificate.pem"])
def test_an_odd_file_is_refused_at_once_with_a_sentence(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    path, kept = folder / name, (folder / name).read_bytes()
    path.unlink()
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(DfcaError, match=r"it is a|it must have at most") as error:
            NodeFolder.load(folder)
        assert str(path) in str(error.value)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(kept)
    assert NodeFolder.load(folder).path == folder


@pytest.mark.parametrize("make", ODD, ids=["pipe", "device", "huge", "folder"])
def test_an_odd_save_is_passed_over_and_the_other_one_is_loaded_and_saved_over(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = DiskStore(tmp_path)
    for round in (1, 2, 3):
        store.save(make_saved(round))
    newest = tmp_path / "peer.1.safetensors"
    newest.unlink()
    make(newest)
    store = DiskStore(tmp_path)
    store.clean()
    saved = store.load()
    assert saved is not None
    assert saved.round == 2
    assert len(store.warnings) == 1
    for round in (4, 5):
        store.save(make_saved(round))
    again = DiskStore(tmp_path)
    assert again.load().round == 5  # type: ignore[union-attr]
    assert again.warnings == []


@pytest.mark.parametrize("make", ODD, ids=["pipe", "device", "huge", "folder"])
def test_an_odd_life_or_control_file_stops_nothing(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "control.json")
    with pytest.raises(NotRunning):
        call(tmp_path, "status")
    if make is not Path.mkdir:
        make(tmp_path / "life.json")
        store = DiskStore(tmp_path)
        assert store.next_life(make_saved(3)) > 10**9  # the time: more than any before
        assert (tmp_path / "life.json").stat().st_size < 100


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.safetensors", "a.parquet"])
@pytest.mark.parametrize("make", ODD, ids=["pipe", "device", "huge", "folder"])
def test_odd_data_is_refused_at_once(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(DfcaError, match=rf"{name} "):
        read(DataRequest(DataConfig(path=name), tmp_path))


def test_pipes_among_images_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    make_pipe(tmp_path / "photos" / "cat" / "a.png")
    with pytest.raises(DfcaError, match="has no images"):
        read(DataRequest(DataConfig(path="photos"), tmp_path))


def test_a_file_that_is_right_is_read(tmp_path: Path) -> None:
    path = Path(write_samples(tmp_path / "a.csv", 0, 1))
    assert read_small(path, 10**6) == path.read_bytes()
    (tmp_path / "link.csv").symlink_to(path)
    assert read_small(tmp_path / "link.csv", 10**6) == path.read_bytes()
    with pytest.raises(OSError, match="a link"):
        read_small(tmp_path / "link.csv", 10**6, follow_links=False)
    with pytest.raises(OSError, match="at most 10 bytes"):
        read_small(path, 10)
