"""The data of a device: every format, every mistake in one sentence, what is held out, and what changes."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.torch import save_file

from dfca.base.errors import DataError
from dfca.node.task.config import DataConfig, NodeConfig
from dfca.node.task.csv_table import read_csv
from dfca.node.task.dataset import DeviceData, held_out_rows, load
from dfca.node.task.facts import Facts, InputFacts, ModelFacts
from dfca.node.task.reading import DataRequest, found_classes, read

ROOM = 2**24
FILES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def request(path: Path, **changes: Any) -> DataRequest:
    options = {key: changes.pop(key) for key in list(changes) if key in DataConfig.descriptions()}
    return DataRequest(DataConfig(path=str(path), **{"label": "y", **options}), path.parent, most_bytes=ROOM, **changes)


def make_facts(**changes: Any) -> Facts:
    plain: dict[str, Any] = {
        "name": "flat",
        "founder": "a" * 52,
        "inputs": InputFacts(features=("a", "b")),
        "label": "y",
        "classes": ("0", "1"),
        "model": ModelFacts(size=1),
    }
    return Facts.checked({**plain, **changes})


def make_config(path: Path, **data: Any) -> NodeConfig:
    return NodeConfig(name="kitchen", data=DataConfig(path=str(path), label="y", **data))


# CSV.


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b,y\n1,2,u\n3,4,v\n", [[1, 2], [3, 4]]),
        ("\ufeffa,b,y\r\n1,2,u\r\n3,4,v\r\n", [[1, 2], [3, 4]]),
        ("a;b;y\n1,5;-2;u\n3;1e2;v", [[1.5, -2], [3, 100]]),
        ("a\tb\ty\n 1 \t2\tu\n\n3\t4\tv\n\n", [[1, 2], [3, 4]]),
        ('"a","b, c",y\n1,2,"u"\n3,4,v\n', [[1, 2], [3, 4]]),
        ("y,a,b\nu,1,2\nv,3,4\nv,5", [[1, 2], [3, 4]]),  # the last line is being written
    ],
)
def test_csv_as_devices_write_it(tmp_path: Path, text: str, values: list[list[float]]) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    table = read_csv(path, request(path))
    np.testing.assert_array_equal(table.values, values)
    assert table.labels == ["u", "v"]
    assert len(table.names) == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty; its first line must name the columns"),
        (b"\n\n", "is empty"),
        (b"a,y\n", "has no rows below the names"),
        (b"a,b\n1,2\n", 'has no column "y" for the class; it has "a", "b"'),
        (b"y\nu\n", "has no column with a feature"),
        (b"a,a,y\n1,2,u\n", 'the column "a" stands there twice'),
        (b"a,,y\n1,2,u\n", "column 2 has no name"),
        (b"1,2,3\n1,2,3\n", "the first line holds numbers"),
        (b"a,y\nx,u\n", 'line 2, column "a": "x" is not a number'),
        (b"a,y\n1,u\n,v\n", 'line 3, column "a" is empty'),
        (b"a,y\n1,u\nNaN,v\n", 'line 3, column "a" is empty'),
        (b"a,y\n1,u\ninf,v\n", '"inf" is not a number'),
        (b"a,y\n1_0,u\n", '"1_0" is not a number'),
        (b"a,y\n1,u\n2,\n", 'line 3, column "y" is empty'),
        (b"a,y\n1,u,2\n", "line 2 has 3 values and the first line 2 columns"),
        (b"a,y\n1\n2,u\n", "line 2 has 1 values"),
        (b"a,y\nx,u\nx,u\nx,u\nx,u\nx,u\n", "(and 2 lines more)"),
        (b"a,y\n1,\xff\n", "line 2: byte 6 is not UTF-8"),
        (b"a,y\n1,\0\n", "is not text"),
        (b'a,y\n1,"' + b"u" * 200_000, "is a quote not closed?"),
        (b"a,y\n1e300,u\n1,u\n", "holds a number beyond 1e+30"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, data: bytes, sentence: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(request(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@FILES
@given(st.one_of(st.binary(max_size=60), st.text('a,y;\t\n\r"1.-e u\ufeff', max_size=60).map(str.encode)))
def test_any_bytes_are_a_table_or_a_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,y\n1,u\n" + data)
    try:
        raw = read(request(path))
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert raw.labels is not None
        assert len(raw.labels) == len(raw.x)
        assert np.isfinite(raw.x).all()


@FILES
@given(
    values=arrays_of.arrays(np.float64, (3, 2), elements=st.floats(-1e30, 1e30)),
    delimiter=st.sampled_from([",", ";", "\t"]),
    order=st.permutations([0, 1, 2]),
)
def test_numbers_survive_csv_whatever_the_order(
    tmp_path: Path, values: np.ndarray, delimiter: str, order: list[int]
) -> None:
    rows = [["a", "b", "y"], *([repr(float(a)), repr(float(b)), "u"] for a, b in values)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(delimiter.join(row[place] for place in order) for row in rows))
    raw = read(request(path, features=("a", "b")))
    np.testing.assert_array_equal(raw.x, values)


def test_rows_with_gaps_are_dropped_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,a,y\nnow,1,u\nnow,,v\nnow,2,\nnow,3,v\n")
    raw = read(request(path, ignore=("time",), missing="drop"))
    assert (raw.x.tolist(), raw.labels, raw.dropped) == ([[1], [3]], ["u", "v"], 2)
    path.write_text("a,y\n,v\n")
    with pytest.raises(DataError, match="has no rows, all 1 have empty values"):
        read(request(path, missing="drop"))


def test_files_that_are_not_there_too_large_or_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give the data by --data"):
        read(request(tmp_path / "a.csv"))
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(DataError, match="is a folder and must be a file of format csv"):
        read(request(tmp_path / "b.csv"))
    (tmp_path / "c.csv").write_bytes(b"a" * (ROOM + 1))
    with pytest.raises(DataError, match=r"must be at most 16777216 bytes \(limits.data_bytes\)"):
        read(request(tmp_path / "c.csv"))


# Arrays.


def test_npz_numbers_names_and_images(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    x, y = np.arange(6.0).reshape(3, 2), np.array([2, 0, 2])
    np.savez(path, x=x, y=y)
    raw = read(request(path))
    assert (raw.kind, raw.names, raw.labels) == ("array", None, ["2", "0", "2"])
    np.savez(path, x=x, y=y, features=np.array(["a", "b"]), classes=np.array(["u", "v", "w"]))
    raw = read(request(path, ignore=("a",)))
    assert (raw.kind, raw.names, raw.labels, raw.x.tolist()) == ("table", ("b",), ["w", "u", "w"], [[1], [3], [5]])
    np.savez(path, x=np.zeros((3, 8, 9, 3), np.uint8), y=np.array(["u", "v", "u"]))
    raw = read(request(path))
    assert (raw.kind, raw.x.shape, raw.labels) == ("images", (3, 3, 8, 9), ["u", "v", "u"])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y": np.zeros(2)}, 'has no array "x"'),
        ({"x": np.zeros((2, 2))}, 'has no array "y"'),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3)}, "y must have one entry per sample, (2,), got (3,)"),
        ({"x": np.zeros((2, 2)), "y": np.array([0.5, 1])}, "y must hold whole numbers or names"),
        ({"x": np.zeros((2, 2)), "y": np.array([np.nan, 1])}, "y must hold whole numbers or names"),
        ({"x": np.zeros(2), "y": np.zeros(2)}, "x must have a shape (n, ...)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "none empty"),
        ({"x": np.array([["a"], ["b"]]), "y": np.zeros(2)}, "x must hold numbers"),
        ({"x": np.array([[1.0], [np.nan]]), "y": np.zeros(2)}, "sample 1 of x is not finite"),
        ({"x": np.array([[None], [1]]), "y": np.zeros(2)}, "cannot be read as npz"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2), "features": np.array(["a"])}, "1 names of features do not fit"),
        ({"x": np.zeros((2, 2)), "y": np.array([0, 5]), "classes": np.array(["u"])}, "y must hold places 0..0"),
        ({"x": np.zeros((2, 2**21)), "y": np.zeros(2)}, "must take at most 16777216 bytes"),
    ],
)
def test_npz_that_cannot_be_used(tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        read(request(path))
    assert sentence in str(caught.value)


@FILES
@given(st.data())
def test_damaged_npz_and_safetensors_are_a_sentence(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["npz", "safetensors"]))
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, x=np.ones((3, 2)), y=np.zeros(3))
    else:
        save_file({"x": torch.ones(3, 2), "y": torch.zeros(3)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    path.write_bytes(content)
    try:
        raw = read(request(path))
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert np.isfinite(raw.x).all()


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("x.npy", bytes(ROOM + 1))
        container.writestr("y.npy", b"")
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="must take at most"):
        read(request(path))


def test_safetensors_of_any_type(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(2, 3, dtype=torch.bfloat16), "y": torch.tensor([1, 0])}, path)
    raw = read(request(path))
    assert (raw.x.tolist(), raw.labels) == ([[1, 1, 1], [1, 1, 1]], ["1", "0"])


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [1, None, 0], "a": [1, 2, 3], "b": [True, False, True], "t": ["x", "y", "z"]}), path)
    with pytest.raises(DataError, match=r'column "t" holds string, not numbers; leave it out by data\.ignore'):
        read(request(path))
    with pytest.raises(DataError, match=r'row 2, column "y" is empty or not finite \(1 rows are so\)'):
        read(request(path, ignore=("t",)))
    raw = read(request(path, ignore=("t",), missing="drop"))
    assert (raw.names, raw.x.tolist(), raw.labels, raw.dropped) == (("a", "b"), [[1, 1], [3, 1]], ["1", "0"], 1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(request(path))


def test_folders_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for place, name in enumerate(["cat", "dog"]):
        (tmp_path / "p" / name).mkdir(parents=True)
        image.new("RGB", (6, 4), (place, 2, 3)).save(tmp_path / "p" / name / "1.png")
    raw = read(request(tmp_path / "p"))
    assert (raw.kind, raw.x.shape, raw.labels) == ("images", (2, 3, 4, 6), ["cat", "dog"])
    assert raw.x[1, :, 0, 0].tolist() == [1, 2, 3]
    small = InputFacts(shape=(1, 2, 2), kind="images")
    assert read(request(tmp_path / "p", inputs=small)).x.shape == (2, 1, 2, 2)
    assert read(request(tmp_path / "p" / "dog", labelled=False, inputs=small)).labels is None
    (tmp_path / "p" / "dog" / "2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2\.png is no image that can be read"):
        read(request(tmp_path / "p"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images"):
        read(request(tmp_path / "empty"))


def test_code_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own_data_d.py").write_text(
        "import torch\n\ndef load():\n    return torch.ones(2, 3), [1, 0]\n\ndef fail():\n    raise KeyError('k')\n"
    )
    own = DataRequest(DataConfig(path="own_data_d:load"), tmp_path)
    assert read(own).labels == ["1", "0"]
    with pytest.raises(DataError, match="own_data_d:fail\" failed with KeyError: 'k'"):
        read(DataRequest(DataConfig(path="own_data_d:fail"), tmp_path))
    with pytest.raises(DataError, match="failed with ModuleNotFoundError"):
        read(DataRequest(DataConfig(path="own_data_e:load"), tmp_path))


def test_classes_are_in_the_order_of_numbers() -> None:
    assert found_classes(["10", "9", "10"], "a.csv") == ("9", "10")
    assert found_classes(["b", "10", "9"], "a.csv") == ("10", "9", "b")
    with pytest.raises(DataError, match='has one class only, "u"'):
        found_classes(["u", "u"], "a.csv")


# What is held out, and what changes.


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.9))
def test_growing_data_keeps_its_sides(seed: int, share: float) -> None:
    x = np.random.default_rng(seed).normal(size=(60, 2))
    out = held_out_rows(x, share)
    np.testing.assert_array_equal(held_out_rows(x[:40], share), out[:40])
    np.testing.assert_array_equal(held_out_rows(x[::-1], share), out[::-1])
    twice = held_out_rows(np.concatenate([x, x]), share)
    np.testing.assert_array_equal(twice[:60], twice[60:])


def test_the_share_is_held_out() -> None:
    out = held_out_rows(np.arange(5000.0)[:, None], 0.2)
    assert abs(out.mean() - 0.2) < 0.02
    assert not held_out_rows(np.ones((3, 1)), 0.0).any()


def write_rows(path: Path, rows: int) -> None:
    path.write_text("a,b,y\n" + "".join(f"{i},{i + 1},{i % 2}\n" for i in range(rows)))


def test_samples_are_parted_scaled_and_numbered(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", 50)
    samples = load(make_config(tmp_path / "a.csv"), tmp_path, make_facts(classes=("1", "0")))
    (x, y), (held_x, held_y) = samples.train, samples.held_out
    assert len(y) + len(held_y) == 50
    assert 2 < len(held_y) < 20
    raw = x.double().sinh()
    torch.testing.assert_close(y, (raw[:, 0].round().long() + 1) % 2)
    assert not set(map(tuple, x.tolist())) & set(map(tuple, held_x.tolist()))
    write_rows(tmp_path / "t.csv", 7)
    tested = load(make_config(tmp_path / "a.csv", test="t.csv"), tmp_path, make_facts())
    assert (len(tested.train[1]), len(tested.held_out[1])) == (50, 7)


def test_nothing_left_to_train_with(tmp_path: Path) -> None:
    share = 0.9
    row = next(i for i in range(100) if held_out_rows(np.array([[float(i), 1.0]]), share).all())
    (tmp_path / "a.csv").write_text(f"a,b,y\n{row},1,0\n")
    with pytest.raises(DataError, match="has 1 samples, and none is left to train with"):
        load(make_config(tmp_path / "a.csv", held_out=share), tmp_path, make_facts())


def test_arrays_against_the_facts(tmp_path: Path) -> None:
    facts = make_facts(inputs=InputFacts(shape=(2, 3), kind="array"))
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((2, 3, 2)), y=[0, 1])
    with pytest.raises(DataError, match=r"samples have shape \(3, 2\) and the swarm's \(2, 3\)"):
        load(make_config(path), tmp_path, facts)
    np.savez(path, x=np.zeros((2, 2)), y=[0, 1])
    with pytest.raises(DataError, match=r"named columns .* these have no names"):
        load(make_config(path), tmp_path, make_facts())
    write_rows(tmp_path / "a.csv", 3)
    with pytest.raises(DataError, match="these samples are columns"):
        load(make_config(tmp_path / "a.csv"), tmp_path, facts)


def test_data_is_read_again_once_it_lies_still(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_rows(path, 50)
    data = DeviceData(make_config(path), tmp_path, make_facts())
    before = data.samples
    assert not data.refresh()
    write_rows(path, 60)
    assert not data.refresh()  # somebody may still be writing
    assert data.refresh()
    assert len(data.samples.train[1]) + len(data.samples.held_out[1]) == 60
    old = set(map(tuple, before.held_out[0].tolist()))
    assert old <= set(map(tuple, data.samples.held_out[0].tolist()))
    assert not data.refresh()


def test_bad_or_absent_data_leaves_the_old_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_rows(path, 50)
    data = DeviceData(make_config(path), tmp_path, make_facts())
    path.write_text("a,b,y\n1,2,7\n")
    assert [data.refresh(), data.refresh()] == [False, False]
    assert data.problem is not None
    assert 'class "7" in "y" is not of the swarm' in data.problem
    os.remove(path)
    assert [data.refresh(), data.refresh()] == [False, False]
    assert data.problem is not None
    assert "does not exist" in data.problem
    assert len(data.samples.train[1]) > 30
    write_rows(path, 55)
    assert [data.refresh(), data.refresh()] == [False, True]
    assert data.problem is None
