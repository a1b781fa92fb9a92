"""The cache, downloads from a server on loopback, imports of .npz, and the catalogue."""

import errno
import hashlib
import http.server
import io
import os
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from dfca.base.errors import ChecksumError, ConfigError, DataError
from dfca.data import registry as known
from dfca.data.files.cache import cache_folder
from dfca.data.registry import catalogue
from dfca.data.sources import fetch, import_file, load


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("DFCA_DATA", str(folder))
    return folder


def mnist(**changes):
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 10,
        "x_test": random.integers(0, 256, (5, 28, 28), dtype=np.uint8),
        "y_test": np.arange(5, dtype=np.uint8),
        **changes,
    }


def har(**changes):
    return {
        "x": np.random.default_rng(0).normal(size=(4, 128, 6)).astype(np.float16),
        "y": np.arange(4, dtype=np.uint8),
        "subject": np.array([1, 1, 2, 2], dtype=np.uint8),
        **changes,
    }


def npz(path, arrays):
    np.savez_compressed(path, **arrays)
    return path


# -------------------------------------------------------------------------------------------------------- loading


def test_a_missing_set_names_both_ways_to_get_it(cache):
    with pytest.raises(DataError) as caught:
        load("mnist")
    assert str(caught.value) == (
        f"mnist is not in the cache {cache}; run `dfca data fetch mnist`, or `dfca data import FILE` "
        "on a machine without internet"
    )


def test_an_unknown_set_names_the_near_ones(cache):
    with pytest.raises(ConfigError, match='unknown dataset "cifar"; did you mean "cifar10"'):
        load("cifar")
    with pytest.raises(ConfigError, match="unknown dataset"):
        fetch("cifar")
    with pytest.raises(ConfigError, match="unknown dataset"):
        import_file("x.npz", name="cifar")


def test_the_layout_is_the_one_of_models(cache):
    npz(cache / "mnist.npz", mnist(writer_train=np.arange(20, dtype=np.int16)))
    dataset = load("mnist")
    assert dataset.x.shape == (20, 1, 28, 28)
    assert np.array_equal(dataset.x[:, 0], mnist()["x_train"])
    assert (dataset.kind, dataset.classes, dataset.y.dtype) == ("image", 10, np.int64)
    assert dataset.owner.tolist() == list(range(20))
    windows = har()
    npz(cache / "hapt_har.npz", windows)
    dataset = load("har")
    assert np.array_equal(dataset.x, windows["x"].swapaxes(1, 2).astype(np.float32))
    assert dataset.owner.tolist() == [1, 1, 2, 2]


def test_digits_are_always_the_same_and_disjoint(cache):
    one, two = load("digits"), load("digits")
    assert one.x.shape == (1437, 1, 8, 8)
    assert one.x_test.shape == (360, 1, 8, 8)
    assert np.array_equal(one.x, two.x)
    assert (one.x.min(), one.x.max()) == (0, 255)
    assert np.bincount(np.concatenate([one.y, one.y_test])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (mnist(x_train=np.zeros((20, 28, 28))), "images must be uint8 in 0..255, x_train is float64"),
        (mnist(x_train=np.zeros((20, 8, 8), np.uint8)), r"has shape \(1, 28, 28\), x_train has \(1, 8, 8\)"),
        (mnist(x_train=np.zeros(20, np.uint8)), r"has shape \(1, 28, 28\)"),
        (mnist(y_train=np.arange(19)), "y_train must be 20 integers"),
        (mnist(y_train=np.zeros(20)), "y_train must be 20 integers .* got float64"),
        (mnist(y_train=np.arange(20)), r"labels must be in 0\.\.9, y_train has 10"),
        (mnist(y_test=np.array([0, 1, 2, 3, -1])), r"labels must be in 0\.\.9, y_test has -1"),
        (mnist(writer_train=np.arange(3)), "the owners must be 20 integers"),
        ({"x_train": mnist()["x_train"]}, "lacks the field y_train; it has x_train"),
        ({}, "lacks the field x_train; it has none"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(cache, tmp_path, arrays, sentence):
    with pytest.raises(DataError, match=sentence):
        import_file(npz(tmp_path / "mnist.npz", arrays))
    assert list(cache.iterdir()) == []


def test_nan_in_windows_is_found(cache, tmp_path):
    arrays = har()
    arrays["x"][2, 5, 1] = np.nan
    with pytest.raises(DataError, match=r"x\[2\] holds NaN or infinity"):
        import_file(npz(tmp_path / "har.npz", arrays))
    with pytest.raises(DataError, match="windows must be floats, x is uint8"):
        import_file(npz(tmp_path / "har.npz", har(x=np.zeros((4, 128, 6), np.uint8))))


# --------------------------------------------------------------------------------------------------------- damage


def test_a_truncated_file_is_told_with_the_way_out(cache):
    path = npz(cache / "mnist.npz", mnist())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ChecksumError, match=r"mnist.npz is damaged .*delete it .*`dfca data fetch mnist`"):
        load("mnist")


def test_a_flipped_byte_is_found_without_a_sidecar(cache):
    path = npz(cache / "mnist.npz", mnist())
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="damaged"):
        load("mnist")


def test_an_exchanged_file_is_found_by_its_sidecar(cache, tmp_path):
    path = import_file(npz(tmp_path / "mnist.npz", mnist()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (cache / "mnist.npz.sha256").read_text() == f"{digest}  mnist.npz\n"
    assert load("mnist").y[1] == 1
    npz(path, mnist(y_train=np.zeros(20, np.uint8)))
    with pytest.raises(ChecksumError, match=r"its SHA-256 is .* mnist.npz.sha256 says"):
        load("mnist")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x05\x06" + bytes(18), b"text"])
def test_files_that_are_no_npz_are_told(cache, content):
    (cache / "mnist.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"mnist\.npz (is damaged|lacks the field)"):
        load("mnist")


def test_pickled_objects_in_an_npz_are_never_loaded(cache):
    npz(cache / "mnist.npz", mnist(y_train=np.array([object()] * 20, dtype=object)))
    with pytest.raises(ChecksumError, match=r"no \.npz of plain arrays"):
        load("mnist")


# -------------------------------------------------------------------------------------------------------- imports


def test_an_npz_is_named_by_its_file_or_by_the_user(cache, tmp_path):
    assert import_file(npz(tmp_path / "hapt_har.npz", har())) == cache / "har.npz"
    assert import_file(npz(tmp_path / "mine.npz", mnist()), name="mnist") == cache / "mnist.npz"
    with pytest.raises(DataError, match=r"cannot recognise which data set .*mine.npz is; .* cifar10, emnist, femnist"):
        import_file(tmp_path / "mine.npz")
    with pytest.raises(DataError, match="lacks the field x_train"):
        import_file(npz(tmp_path / "other.npz", {"z": np.zeros(2)}), name="cifar10")


def test_importing_the_cache_file_itself_adds_its_checksum(cache):
    path = npz(cache / "mnist.npz", mnist())
    before = path.read_bytes()
    assert import_file(path) == path
    assert path.read_bytes() == before
    assert (cache / "mnist.npz.sha256").exists()


def test_unknown_files_list_what_is_accepted(cache, tmp_path):
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"x\.csv is not recognised; give an \.npz .*MNIST's four idx files.*LEAF"):
        import_file(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"none\.zip does not exist; give an \.npz"):
        import_file(tmp_path / "none.zip")


def test_a_good_file_survives_a_bad_import(cache, tmp_path):
    import_file(npz(tmp_path / "mnist.npz", mnist()))
    with pytest.raises(DataError):
        import_file(npz(tmp_path / "mnist.npz", mnist(y_test=np.full(5, 99))))
    assert len(load("mnist").y) == 20


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(cache, tmp_path, monkeypatch):
    import_file(npz(tmp_path / "mnist.npz", mnist()))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write to .*No space left on device; make room or set DFCA_DATA"):
        import_file(npz(tmp_path / "mnist.npz", mnist(y_train=np.zeros(20, np.uint8))))
    assert load("mnist").y[1] == 1
    assert sorted(path.name for path in cache.iterdir()) == ["mnist.npz", "mnist.npz.sha256"]


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFCA_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write to .*; make room or set DFCA_DATA"):
        import_file(npz(tmp_path / "mnist.npz", mnist()))


def test_reading_needs_no_right_to_write(cache):
    npz(cache / "mnist.npz", mnist())
    cache.chmod(0o555)
    try:
        assert len(load("mnist").y) == 20
        assert fetch("mnist") == cache / "mnist.npz"
    finally:
        cache.chmod(0o755)


def test_without_dfca_data_the_platforms_cache_is_used(monkeypatch):
    monkeypatch.delenv("DFCA_DATA", raising=False)
    assert "dfca" in str(cache_folder())


# -------------------------------------------------------------------------------------------------------- fetching


@pytest.fixture
def server():
    """Serve files from memory on loopback; `served` counts the requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.append(self.path)
            data = files.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write((data or b"")[: cut.get(self.path)])

        def log_message(self, *args):
            pass

    files, served, cut = {}, [], {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        httpd.files, httpd.served, httpd.cut = files, served, cut
        httpd.url = f"http://127.0.0.1:{httpd.server_port}"
        yield httpd
        httpd.shutdown()
        thread.join()


def har_zip(first=1.0):
    rows = "\n".join(f"{first} 0.5 0.25" for _ in range(200)).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("RawData/labels.txt", "1 7 3 1 200\n")
        archive.writestr("RawData/acc_exp01_user07.txt", rows)
        archive.writestr("RawData/gyro_exp01_user07.txt", rows)
    return buffer.getvalue()


def point(monkeypatch, server, paths=("/hapt.zip",), sha256=None):
    """Point the registry's har at the server."""
    file = replace(known.SOURCES["har"].files[0], urls=tuple(server.url + path for path in paths), sha256=sha256)
    monkeypatch.setitem(known.SOURCES, "har", replace(known.SOURCES["har"], files=(file,)))


def test_fetch_downloads_parses_and_keeps_only_the_result(cache, server, monkeypatch, capsys):
    server.files["/hapt.zip"] = har_zip()
    point(monkeypatch, server, sha256=hashlib.sha256(har_zip()).hexdigest())
    assert fetch("har") == cache / "har.npz"
    assert load("har").owner.tolist() == [7, 7]
    assert sorted(path.name for path in cache.iterdir()) == ["har.npz", "har.npz.sha256"]
    assert capsys.readouterr() == ("", "")
    fetch("har")
    assert server.served == ["/hapt.zip"], "what is here and whole is not fetched again"


def test_fetch_replaces_a_damaged_file(cache, server, monkeypatch):
    server.files["/hapt.zip"] = har_zip()
    point(monkeypatch, server, sha256=hashlib.sha256(har_zip()).hexdigest())
    (cache / "har.npz").write_bytes(b"half a fi")
    fetch("har")
    assert load("har").y.tolist() == [2, 2]


def test_wrong_bytes_are_a_checksum_error_and_leave_nothing(cache, server, monkeypatch):
    server.files["/hapt.zip"] = har_zip()
    point(monkeypatch, server, sha256="0" * 64)
    digest = hashlib.sha256(har_zip()).hexdigest()[:12]
    with pytest.raises(ChecksumError) as caught:
        fetch("har")
    assert str(caught.value) == (
        f"{server.url}/hapt.zip has SHA-256 {digest}... instead of 000000000000...; try again, or get the file "
        "elsewhere and run `dfca data import FILE`"
    )
    assert list(cache.iterdir()) == []


def test_a_failed_download_names_the_address_and_leaves_nothing(cache, server, monkeypatch):
    point(monkeypatch, server)
    with pytest.raises(DataError, match=r"/hapt.zip failed \(HTTP 404\); try again, or get the file elsewhere"):
        fetch("har")
    assert list(cache.iterdir()) == []


def test_a_connection_that_breaks_off_is_a_failed_download(cache, server, monkeypatch):
    server.files["/hapt.zip"] = har_zip()
    server.cut["/hapt.zip"] = 100
    point(monkeypatch, server)
    with pytest.raises(DataError, match=r"download of .*/hapt.zip failed"):
        fetch("har")
    assert list(cache.iterdir()) == []


def test_no_server_at_all_is_a_failed_download(cache, monkeypatch):
    file = replace(known.SOURCES["har"].files[0], urls=("http://127.0.0.1:9/hapt.zip",))
    monkeypatch.setitem(known.SOURCES, "har", replace(known.SOURCES["har"], files=(file,)))
    with pytest.raises(DataError, match=r"failed \(ConnectionError\)"):
        fetch("har")


def test_the_next_mirror_is_tried(cache, server, monkeypatch):
    server.files |= {"/wrong.zip": b"<html>moved</html>", "/right.zip": har_zip()}
    digest = hashlib.sha256(har_zip()).hexdigest()
    point(monkeypatch, server, ("/missing.zip", "/wrong.zip", "/right.zip"), sha256=digest)
    fetch("har")
    assert server.served == ["/missing.zip", "/wrong.zip", "/right.zip"]


def test_without_a_published_checksum_the_first_download_is_trusted_and_said(cache, server, monkeypatch):
    archive = har_zip()  # once: it holds the time
    server.files["/hapt.zip"] = archive
    point(monkeypatch, server)
    notes = []
    fetch("har", notify=notes.append)
    digest = hashlib.sha256(archive).hexdigest()
    assert (cache / "har.source.sha256").read_text().startswith(digest)
    assert len(notes) == 1
    assert "no checksum of har is published: this first download is trusted" in notes[0]
    (cache / "har.npz").unlink()
    fetch("har", notify=notes.append)
    assert len(notes) == 1, "the same bytes again are no news"
    (cache / "har.npz").unlink()
    server.files["/hapt.zip"] = har_zip(first=2.0)
    with pytest.raises(ChecksumError, match=r"recorded in .*har\.source\.sha256; delete it to trust this one"):
        fetch("har", notify=notes.append)
    assert not (cache / "har.npz").exists()


def test_a_page_instead_of_an_archive_is_not_trusted(cache, server, monkeypatch):
    server.files["/hapt.zip"] = b"<html>please log in</html>"
    point(monkeypatch, server)
    with pytest.raises(DataError, match=r"lacks RawData/labels\.txt"):
        fetch("har")
    assert list(cache.iterdir()) == []


def test_femnist_says_what_to_run(cache):
    with pytest.raises(
        DataError, match=r"no single official download: LEAF's pipeline .*preprocess\.sh.*dfca data import"
    ):
        fetch("femnist")


def test_digits_are_here_already(cache):
    assert fetch("digits").is_file()


# ------------------------------------------------------------------------------------------------------- catalogue


def test_the_catalogue_says_what_is_here(cache):
    npz(cache / "hapt_har.npz", har())
    rows = {row.name: row for row in catalogue()}
    assert list(rows) == ["digits", "mnist", "emnist", "cifar10", "femnist", "har", "forecast"]
    assert {name: row.source.classes for name, row in rows.items()} == {
        "digits": 10,
        "mnist": 10,
        "emnist": 47,
        "cifar10": 10,
        "femnist": 62,
        "har": 6,
        "forecast": 1,
    }
    assert rows["har"].path == cache / "hapt_har.npz"
    assert {name for name, row in rows.items() if row.ready} == {"digits", "har", "forecast"}
    assert rows["mnist"].path is None


def test_every_official_file_has_a_checksum_or_is_known_to_have_none():
    without = {source.name for source in known.SOURCES.values() for file in source.files if file.sha256 is None}
    assert without == {"har"}
    for source in known.SOURCES.values():
        assert bool(source.files) != bool(source.by_hand) or source.name == "digits"
        for file in source.files:
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32
            assert all(url.startswith("https://") for url in file.urls)
