"""The parsers, on small files written here in the official formats."""

import contextlib
import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfca.base.errors import DataError
from dfca.data.files import containers
from dfca.data.files.formats import parse_idx
from dfca.data.files.pickles import read_pickle
from dfca.data.sources import import_file, load


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DFCA_DATA", str(folder))
    return folder


def random_bytes(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def image_set(n_train=4, n_test=2, classes=10):
    return {
        "x_train": random_bytes(n_train, 28, 28),
        "y_train": np.arange(n_train, dtype=np.uint8) % classes,
        "x_test": random_bytes(n_test, 28, 28, seed=1),
        "y_test": np.arange(n_test, dtype=np.uint8)[::-1].copy(),
    }


def mnist_files(arrays):
    return {
        "train-images-idx3-ubyte.gz": gzip.compress(idx(arrays["x_train"])),
        "train-labels-idx1-ubyte.gz": gzip.compress(idx(arrays["y_train"])),
        "t10k-images-idx3-ubyte.gz": gzip.compress(idx(arrays["x_test"])),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(idx(arrays["y_test"])),
    }


def write_folder(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def same_images(dataset, arrays):
    return (
        np.array_equal(dataset.x[:, 0], arrays["x_train"])
        and np.array_equal(dataset.y, arrays["y_train"])
        and np.array_equal(dataset.x_test[:, 0], arrays["x_test"])
        and np.array_equal(dataset.y_test, arrays["y_test"])
    )


# --------------------------------------------------------------------------------------------------- idx, MNIST


@pytest.mark.parametrize("shape", ["folder", "zip", "plain", "dotted"])
def test_mnist_is_read_from_a_folder_or_a_zip(tmp_path, cache, shape):
    arrays = image_set()
    files = mnist_files(arrays)
    if shape == "zip":
        origin = write_zip(tmp_path / "mnist.zip", {f"raw/{name}": data for name, data in files.items()})
    else:
        if shape == "plain":
            files = {name.removesuffix(".gz"): gzip.decompress(data) for name, data in files.items()}
        if shape == "dotted":
            files = {name.replace("-idx", ".idx"): data for name, data in files.items()}
        origin = write_folder(tmp_path / "raw", files)
    assert import_file(origin) == cache / "mnist.npz"
    dataset = load("mnist")
    assert same_images(dataset, arrays)
    assert dataset.x.shape == (4, 1, 28, 28)
    assert (dataset.x.dtype, dataset.y.dtype, dataset.owner) == (np.uint8, np.int64, None)


def test_a_lone_idx_file_says_what_else_is_needed(tmp_path):
    write_folder(tmp_path, {"train-images-idx3-ubyte.gz": gzip.compress(idx(random_bytes(1, 28, 28)))})
    with pytest.raises(DataError, match=r"lacks t10k-images-idx3-ubyte, .* give the folder or zip that holds all four"):
        import_file(tmp_path / "train-images-idx3-ubyte.gz")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "not an idx file of bytes"),
        (idx(random_bytes(3, 4))[:-1], "cut short: 23 bytes instead of 24"),
        (idx(random_bytes(3, 4)) + b"x", "25 bytes instead of 24"),
        (idx(random_bytes(3, 4))[:7], "cut short"),
    ],
)
def test_damaged_idx_files_are_refused(data, sentence):
    with pytest.raises(DataError, match=sentence):
        parse_idx(data, "file")


def test_a_truncated_gzip_leaves_the_cache_empty(tmp_path, cache):
    files = mnist_files(image_set())
    files["train-images-idx3-ubyte.gz"] = files["train-images-idx3-ubyte.gz"][:-20]
    with pytest.raises(DataError, match="damaged"):
        import_file(write_folder(tmp_path / "raw", files))
    assert not cache.exists()


def test_labels_out_of_range_are_refused_before_the_cache_is_touched(tmp_path, cache):
    arrays = image_set() | {"y_test": np.array([1, 10])}
    with pytest.raises(DataError, match=r"labels must be in 0\.\.9, y_test has 10"):
        import_file(write_folder(tmp_path / "raw", mnist_files(arrays)))
    assert not cache.exists()


# ------------------------------------------------------------------------------------------------------- EMNIST


def emnist_files(arrays):
    names = {"x": "images-idx3", "y": "labels-idx1"}
    files = {"gzip/emnist-letters-train-images-idx3-ubyte.gz": b"not read"}
    for field, array in arrays.items():
        stored = array.swapaxes(1, 2) if field.startswith("x") else array
        name = f"gzip/emnist-balanced-{field[2:]}-{names[field[0]]}-ubyte.gz"
        files[name] = gzip.compress(idx(stored))
    return files


def test_emnist_comes_out_upright(tmp_path):
    arrays = image_set(classes=47)
    import_file(write_zip(tmp_path / "gzip.zip", emnist_files(arrays)))
    dataset = load("emnist")
    assert same_images(dataset, arrays)
    assert dataset.classes == 47


def test_a_cut_zip_is_damaged(tmp_path, cache):
    whole = write_zip(tmp_path / "gzip.zip", emnist_files(image_set()))
    whole.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(DataError, match="damaged, cut short or locked"):
        import_file(whole)
    assert not cache.exists()


# ------------------------------------------------------------------------------------------------------ CIFAR-10


def cifar_files(batches):
    """Batches as Python 2 wrote them: protocol 2, keys and arrays as bytes."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {
        f"cifar-10-batches-py/{name}": pickle.dumps(
            {
                b"batch_label": b"x",
                b"labels": y.tolist(),
                b"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1),
                b"filenames": [b"a.png"] * len(x),
            },
            protocol=2,
        )
        for name, (x, y) in zip(names, batches, strict=True)
    }


def cifar_batches():
    return [(random_bytes(3, 32, 32, 3, seed=i), np.arange(3) + i) for i in range(6)]


def test_cifar10_is_read_from_its_tar(tmp_path):
    batches = cifar_batches()
    import_file(write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_files(batches)))
    dataset = load("cifar10")
    images = np.concatenate([x for x, _ in batches[:5]])
    assert np.array_equal(dataset.x, images.transpose(0, 3, 1, 2))
    assert dataset.y.tolist() == np.concatenate([y for _, y in batches[:5]]).tolist()
    assert np.array_equal(dataset.x_test, batches[5][0].transpose(0, 3, 1, 2))
    assert dataset.y_test.tolist() == batches[5][1].tolist()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_wants_to_act_is_refused(tmp_path, cache):
    files = cifar_files(cifar_batches())
    files["cifar-10-batches-py/data_batch_1"] = pickle.dumps({b"data": Bomb(tmp_path / "owned")}, protocol=2)
    with pytest.raises(DataError, match=r"data_batch_1 is refused: the pickle asks for (io|_io)\.open"):
        import_file(write_tar(tmp_path / "cifar-10-python.tar.gz", files))
    assert not (tmp_path / "owned").exists()
    assert not cache.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy\nfromfile\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromstring\n.",
        pickle.dumps(np.array([object()], dtype=object), protocol=2),
        pickle.dumps(np.array([1.5]), protocol=2),
        b"not a pickle",
        b"",
    ],
)
def test_everything_but_plain_bytes_and_integers_is_refused(data):
    with pytest.raises(DataError, match=r"refused|not a readable"):
        read_pickle(data, "batch")


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_never_more_than_an_error(data):
    with contextlib.suppress(DataError):
        read_pickle(data, "batch")
    with contextlib.suppress(DataError):
        parse_idx(b"\0\0\x08" + data, "file")


def test_codecs_cannot_be_chosen_by_the_pickle():
    data = b"c_codecs\nencode\n(X\x01\x00\x00\x00\xe9X\x05\x00\x00\x00rot13tR.".replace(
        b"\x01\x00\x00\x00\xe9", b"\x02\x00\x00\x00\xc3\xa9"
    )
    assert read_pickle(data, "batch") == b"\xe9"


def test_a_tar_without_all_batches_names_them(tmp_path):
    files = cifar_files(cifar_batches())
    del files["cifar-10-batches-py/data_batch_3"]
    with pytest.raises(DataError, match="lacks data_batch_3"):
        import_file(write_tar(tmp_path / "cifar.tar.gz", files))


def test_a_batch_of_another_shape_is_refused(tmp_path):
    files = cifar_files(cifar_batches())
    files["cifar-10-batches-py/test_batch"] = pickle.dumps({b"labels": [1]}, protocol=2)
    with pytest.raises(DataError, match=r"test_batch is not a CIFAR-10 batch: it needs data \(n, 3072\)"):
        import_file(write_tar(tmp_path / "cifar.tar.gz", files))


def test_a_cut_tar_is_damaged(tmp_path):
    path = write_tar(tmp_path / "cifar.tar.gz", cifar_files(cifar_batches()))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(DataError, match="damaged, cut short or locked"):
        import_file(path)


# ---------------------------------------------------------------------------------------------------------- LEAF


def leaf_json(users):
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": {
                user: {"x": (x.reshape(len(y), -1) / 255).tolist(), "y": y.tolist()} for user, (x, y) in users.items()
            },
        }
    ).encode()


def writer(n, seed):
    return random_bytes(n, 28, 28, seed=seed), np.arange(n) + seed


def test_leaf_json_is_read_by_writer(tmp_path):
    ann, bob = writer(2, 1), writer(3, 2)
    origin = tmp_path / "all_data_0.json"
    origin.write_bytes(leaf_json({"f2": bob, "f1": ann}))
    import_file(origin)
    dataset = load("femnist")
    assert np.array_equal(dataset.x[:, 0], 255 - np.concatenate([ann[0], bob[0]]))  # LEAF's images are dark on white
    assert dataset.y.tolist() == [1, 2, 2, 3, 4]
    assert dataset.owner.tolist() == [0, 0, 1, 1, 1]
    assert (dataset.x_test, dataset.y_test) == (None, None)


def test_leafs_earlier_stages_do_not_count_twice(tmp_path):
    (one, two), (three, _) = (writer(2, 1), writer(2, 3)), (writer(2, 5), None)
    files = {
        "data/all_data/all_data_0.json": leaf_json({"f1": one, "f9": three}),
        "data/train/a_train.json": leaf_json({"f1": one}),
        "data/test/a_test.json": leaf_json({"f1": two}),
    }
    for origin in (write_folder(tmp_path / "leaf", files), write_zip(tmp_path / "leaf.zip", files)):
        import_file(origin)
        dataset = load("femnist")
        assert sorted(dataset.y.tolist()) == [1, 2, 3, 4]
        assert dataset.owner.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"users": ["f1"], "user_data": {}}',
        b'{"users": ["f1"], "user_data": {"f1": {"x": [[0.5]], "y": [1]}}}',
        leaf_json({"f1": (random_bytes(1, 28, 28) * np.float64(300), np.array([1]))}),
        json.dumps({"users": ["f"], "user_data": {"f": {"x": [[float("nan")] * 784], "y": [1]}}}).encode(),
    ],
)
def test_other_json_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match="not LEAF's FEMNIST json"):
        import_file(tmp_path / "x.json")


def test_leaf_labels_are_checked(tmp_path):
    (tmp_path / "x.json").write_bytes(leaf_json({"f1": writer(1, 62)}))
    with pytest.raises(DataError, match=r"labels must be in 0\.\.61, y has 62"):
        import_file(tmp_path / "x.json")


# ---------------------------------------------------------------------------------------------------------- HAPT


def table(rows):
    return "\n".join(" ".join(repr(float(value)) for value in row) for row in rows).encode() + b"\n"


def hapt_files():
    """Two recordings in which every channel is its sample number times a constant."""
    ticks = np.arange(400)[:, None]
    labels = "1 1 5 11 202\n1 1 7 203 400\n2 3 1 1 127\n2 3 2 1 400\n"
    return {
        "HAPT Data Set/RawData/labels.txt": labels.encode(),
        "HAPT Data Set/RawData/acc_exp01_user01.txt": table(ticks * [1.0, 2, 3]),
        "HAPT Data Set/RawData/gyro_exp01_user01.txt": table(ticks * [4.0, 5, 6]),
        "HAPT Data Set/RawData/acc_exp02_user03.txt": table(ticks * [1.0, 2, 3]),
        "HAPT Data Set/RawData/gyro_exp02_user03.txt": table(ticks * [4.0, 5, 6]),
        "HAPT Data Set/Train/X_train.txt": b"not read",
    }


@pytest.mark.parametrize("wrapped", [False, True])
def test_hapt_windows_lie_within_their_interval(tmp_path, wrapped):
    origin = write_zip(tmp_path / "hapt.zip", hapt_files())
    if wrapped:
        origin = write_zip(tmp_path / "outer.zip", {"HAPT Data Set.zip": origin.read_bytes(), "readme.names": b""})
    import_file(origin)
    dataset = load("har")
    # 11..202 holds 192 samples: two windows, from 11 and 75. 1..127 is too short. 1..400: five windows.
    assert dataset.y.tolist() == [4, 4, 1, 1, 1, 1, 1]
    assert dataset.owner.tolist() == [1, 1, 3, 3, 3, 3, 3]
    assert dataset.x.shape == (7, 6, 128)
    assert dataset.x[:, 0, 0].tolist() == [10, 74, 0, 64, 128, 192, 256]
    assert dataset.x[0, :, 1].tolist() == [11, 22, 33, 44, 55, 66]
    assert dataset.x[1, 0, -1] == 201
    assert (dataset.kind, dataset.x.dtype) == ("window", np.float32)


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("gyro_exp02_user03.txt", None, "lacks RawData/gyro_exp02_user03.txt"),
        ("labels.txt", b"1 1 5\n", "lacks RawData/labels.txt with 5 columns"),
        ("labels.txt", b"1 1 5 1 100\n", "no interval of at least 128 samples"),
        ("labels.txt", b"1 1 5 -1000000000000 400\n", r"an interval from -1000000000000 to 400; get it again"),
        ("labels.txt", b"1 1 5 1 400\n" * 3000, "the intervals of labels.txt overlap; get it again"),
        ("acc_exp01_user01.txt", b"1 2 x\n", "not a table of numbers"),
        ("acc_exp01_user01.txt", b"", "it is empty"),
        ("acc_exp01_user01.txt", table(np.ones((400, 2))), "must have the 3 columns x y z"),
        ("acc_exp01_user01.txt", table(np.full((400, 3), np.nan)), r"x\[0\] holds NaN or infinity"),
    ],
)
def test_damaged_hapt_archives_are_refused(tmp_path, cache, name, data, sentence):
    files = hapt_files()
    del files[f"HAPT Data Set/RawData/{name}"]
    if data is not None:
        files[f"HAPT Data Set/RawData/{name}"] = data
    with pytest.raises(DataError, match=sentence):
        import_file(write_zip(tmp_path / "hapt.zip", files))
    assert not cache.exists()


# ------------------------------------------------------------------------------------------------ archives too large


def test_a_small_archive_that_unpacks_to_much_is_refused(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(containers, "SMALL_BYTES", 2**20)  # 64 times as much takes seconds to pack
    zeros = bytes(3 * 2**20)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
            archive.writestr(name, zeros)
        archive.writestr("t10k-labels-idx1-ubyte", b"")
    with pytest.raises(DataError, match=r"unpacks from \d+ to 3145728 bytes, which no data set here does"):
        import_file(path)
    packed = gzip.compress(zeros)
    with pytest.raises(DataError, match="unpacks from"):
        parse_idx(packed, "train-images-idx3-ubyte.gz")
    with (tmp_path / "mnist.npz").open("wb") as file:
        np.savez_compressed(file, x_train=np.zeros(3 * 2**20, np.uint8))
    with pytest.raises(DataError, match="unpacks from"):
        import_file(tmp_path / "mnist.npz")
    assert not cache.exists()


def test_the_unpickler_hands_out_stand_ins_only():
    grab = b"cnumpy\nndarray\n."
    assert read_pickle(grab, "batch") is not np.ndarray
    with pytest.raises(DataError, match="must not make arrays by itself"):
        read_pickle(b"cnumpy\nndarray\n(I1000000000000\ntR.", "batch")
