"""Models as bytes: exact where they say so, within the stated error elsewhere, and never anything but a sound model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from dfca.core.learning.params import FlatModel
from dfca.models import cnn
from dfca.node.wire import payload
from dfca.node.wire.frames import ENCODINGS, REASONS, Refused
from dfca.node.wire.payload import BLOCK, Expect, pack, unpack

FINITE32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
FINITE64 = st.floats(allow_nan=False, allow_infinity=False, width=64)
SHAPES = st.one_of(st.tuples(st.integers(1, 200)), st.tuples(st.integers(1, 3), st.integers(1, 100)))
ONE = torch.linspace(-1, 1, 100)


def expect(model: Tensor, **rest: Any) -> Expect:
    rows = None if model.dim() == 1 else len(model)
    return Expect(model.shape[-1], **{"dtype": model.dtype, "rows": rows, **rest})


def refusal(call: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(Refused) as refused:
        call(*given, **named)
    assert refused.value.reason in REASONS
    return refused.value.reason


# Exact.


@settings(max_examples=60, deadline=None)
@given(numbers=arrays(np.float32, SHAPES, elements=FINITE32), compress=st.booleans())
def test_float32_is_exact(numbers: np.ndarray, compress: bool) -> None:
    model = torch.from_numpy(numbers)
    data = pack(model, "float32", compress)
    unpacked = unpack(data, expect(model, encoding="float32", digest=payload.name(data)))
    assert unpacked.shape == model.shape
    assert unpacked.numpy().tobytes() == numbers.tobytes()
    assert len(data) <= payload.most_bytes(expect(model))


@settings(max_examples=30, deadline=None)
@given(numbers=arrays(np.float64, SHAPES, elements=FINITE64), compress=st.booleans())
def test_float64_is_exact(numbers: np.ndarray, compress: bool) -> None:
    model = torch.from_numpy(numbers)
    unpacked = unpack(pack(model, "float64", compress), expect(model))
    assert unpacked.numpy().tobytes() == numbers.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(300,), (3, 100)])
def test_the_same_numbers_make_the_same_bytes(encoding: str, shape: tuple[int, ...]) -> None:
    model = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 30
    assert pack(model, encoding) == pack(model.clone(), encoding)
    strided = torch.stack([model, model], dim=-1)[..., 0]
    assert pack(strided, encoding) == pack(model, encoding)


def test_an_array_is_read_like_bytes_and_the_result_of_bytes_is_its_own() -> None:
    data = bytearray(pack(ONE))
    copied, read = unpack(data, expect(ONE)), unpack(np.frombuffer(bytes(data), np.uint8).copy(), expect(ONE))
    data[:] = bytes(len(data))
    copied += 1
    assert torch.equal(copied, ONE + 1)
    assert torch.equal(read, ONE)


def test_other_programs_read_it_and_are_read() -> None:
    """A file is plain safetensors, also with another order of keys and another alignment."""
    assert torch.equal(safetensors.torch.load(pack(ONE))["model"], ONE)
    facts = {"encoding": "float32", "form": "dfca-model-1", "written_by": "somebody else"}
    assert torch.equal(unpack(safetensors.torch.save({"model": ONE}, metadata=facts), expect(ONE)), ONE)


# Rounded.


@settings(max_examples=60, deadline=None)
@given(numbers=arrays(np.float32, SHAPES, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_bf16_is_the_nearest(numbers: np.ndarray) -> None:
    model = torch.from_numpy(numbers)
    unpacked = unpack(pack(model, "bf16"), expect(model))
    assert torch.equal(unpacked, model.bfloat16().float())


@settings(max_examples=100, deadline=None)
@given(
    numbers=arrays(np.float32, SHAPES, elements=st.floats(-1000, 1000, width=32)),
    tail=st.integers(0, 100),
)
def test_int8_is_within_half_a_step_of_its_block(numbers: np.ndarray, tail: int) -> None:
    """|x - s q| <= s / 2, s = max |x| / 127 over the block; the tail is exact."""
    model = torch.from_numpy(numbers)
    size = model.shape[-1]
    tail = min(tail, size)
    unpacked = unpack(pack(model, "int8", tail=tail), expect(model))
    assert torch.equal(unpacked[..., size - tail :], model[..., size - tail :])
    for start in range(0, size - tail, BLOCK):
        block = slice(start, min(start + BLOCK, size - tail))
        step = model[..., block].abs().amax(dim=-1, keepdim=True) / 127
        assert bool(((unpacked - model)[..., block].abs() <= step * 0.50001 + 1e-44).all())


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_a_model_that_is_handed_on_is_rounded_once(encoding: str) -> None:
    model = torch.randn(3, 6400, generator=torch.Generator().manual_seed(3))
    first = pack(model, encoding)
    assert pack(unpack(first, expect(model)), encoding) == first


def test_int8_by_hand() -> None:
    """One block with the largest number 127: the step is 1."""
    model = torch.tensor([127.0, -127.0, 0.4, 0.6, -2.5, 3.5, 0.0])
    assert unpack(pack(model, "int8"), expect(model)).tolist() == [127, -127, 0, 1, -2, 4, 0]


def test_small_variances_survive_int8_in_the_tail() -> None:
    flat = FlatModel(cnn((1, 16, 16), 10, 20, (4, 6)))
    model = torch.rand(flat.size, generator=torch.Generator().manual_seed(0))
    model[-3], model[-1] = 1e-4, 1e3
    assert unpack(pack(model, "int8"), expect(model))[-3] == 0
    assert unpack(pack(model, "int8", tail=flat.size - flat.trained), expect(model))[-3] == model[-3]


def test_sizes_by_encoding() -> None:
    model = torch.randn(64_000, generator=torch.Generator().manual_seed(0)) / 30
    sizes = {key: len(pack(model, key, compress=False)) / (4 * len(model)) for key in ("float32", "bf16", "int8")}
    assert sizes == {"float32": pytest.approx(1, abs=2e-3), "bf16": pytest.approx(0.5, abs=2e-3),
                     "int8": pytest.approx((1 + 4 / BLOCK) / 4, abs=2e-3)}  # fmt: skip
    assert len(pack(model, "bf16")) < 0.75 * len(pack(model, "bf16", compress=False))
    assert len(pack(model, "float32", compress=True)) < 0.9 * len(pack(model))
    noise = torch.from_numpy(np.random.default_rng(0).integers(1, 2**30, 64_000, dtype=np.int32)).view(torch.float32)
    assert pack(noise, "float32", compress=True)[:4] != payload._MAGIC or len(pack(noise, compress=True)) < 0.95 * 256e3


# Refused.


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tail", [0, 50])
def test_models_that_are_not_finite_are_not_packed(encoding: str, bad: float, tail: int) -> None:
    model = ONE.clone()
    model[70] = bad
    assert refusal(pack, model, encoding, tail=tail) == "not_finite"


def test_numbers_that_rounding_makes_infinite_are_not_packed() -> None:
    assert refusal(pack, torch.full((3,), 3.4e38), "bf16") == "not_finite"
    assert refusal(pack, torch.full((3,), 1e300, dtype=torch.float64), "int8") == "not_finite"
    assert refusal(pack, torch.full((3,), 1e300, dtype=torch.float64), "float32") == "not_finite"


def test_models_that_cannot_be_packed() -> None:
    assert refusal(pack, ONE, "pickle") == "encoding"
    assert refusal(pack, torch.zeros(2, 2, 2)) == "shape"
    assert refusal(pack, torch.zeros(0)) == "shape"
    assert refusal(pack, torch.zeros(3, dtype=torch.int32)) == "shape"
    assert refusal(pack, ONE, "int8", tail=101) == "size"


def file(tensors: dict[str, tuple[str, list[int], bytes]], **facts: str) -> bytes:
    """Write a safetensors file of anything."""
    header: dict[str, Any] = {"__metadata__": {"form": "dfca-model-1", "encoding": "float32", **facts}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def raw(*numbers: float, dtype: Any = np.float32) -> bytes:
    return np.array(numbers, dtype).tobytes()


WANTED = Expect(3)
INT8 = {"model": ("I8", [3], b"\1\2\3"), "scales": ("F32", [1], raw(1)), "tail": ("F32", [0], b"")}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "malformed"),
        (b"\0" * 8, "malformed"),
        (b"\xff" * 100, "malformed"),
        ((4000).to_bytes(8, "little") + b"[" * 4000, "malformed"),
        ((4).to_bytes(8, "little") + b"1234", "malformed"),
        (file({"model": ("F32", [3], raw(1, 2, 3))}, form="dfca-model-2"), "malformed"),
        (file({"model": ("F32", [4], raw(1, 2, 3))}), "malformed"),
        (file({"model": ("F32", [3], raw(1, 2, 3))}) + b"\0", "malformed"),
        (file({"model": ("F32", [3.0], raw(1, 2, 3))}), "malformed"),
        (file({"model": ("F32", [True, 3], raw(1, 2, 3))}), "malformed"),
        (file({"model": ("F32", [2**40, 2**40, 0], b"")}), "shape"),
        (file({"model": ("F8", [3], b"123")}), "dtype"),
        (file({"model": ("F32", [3], raw(1, 2, 3))}, encoding="pickle"), "encoding"),
        (file({"model": ("F64", [3], raw(1, 2, 3, dtype=np.float64))}, encoding="float64"), "dtype"),
        (file({"model": ("BF16", [3], b"123456")}), "dtype"),
        (file({"model": ("F32", [2], raw(1, 2))}), "size"),
        (file({"model": ("F32", [1, 3], raw(1, 2, 3))}), "shape"),
        (file({"bank": ("F32", [3], raw(1, 2, 3))}), "field"),
        (file({"model": ("F32", [3], raw(1, 2, 3)), "more": ("F32", [1], raw(1))}), "field"),
        (file({"model": ("F32", [3], raw(1, np.nan, 3))}), "not_finite"),
        (file({"model": ("F32", [3], raw(1, np.inf, 3))}), "not_finite"),
        (file({**INT8, "scales": ("F32", [1], raw(np.inf))}, encoding="int8"), "not_finite"),
        (file({**INT8, "scales": ("F32", [1], raw(3e38))}, encoding="int8"), "not_finite"),
        (file({**INT8, "scales": ("F32", [2], raw(1, 1))}, encoding="int8"), "size"),
        (file({**INT8, "tail": ("F32", [4], raw(1, 2, 3, 4))}, encoding="int8"), "size"),
        (file({"model": INT8["model"], "scales": INT8["scales"]}, encoding="int8"), "field"),
    ],
    ids=range(26),
)
def test_files_that_are_refused(data: bytes, reason: str) -> None:
    if reason == "shape" and b"1099511627776" in data:
        reason = "size"  # a shape that is far beyond, of no bytes
    assert refusal(unpack, data, WANTED) == reason
    compressed = zstandard.ZstdCompressor().compress(data)
    assert refusal(unpack, compressed, WANTED) == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "int8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
    value=JSON,
    place=st.sampled_from(["", "__metadata__", "model", "form", "encoding", "dtype", "shape", "data_offsets"]),
)
def test_headers_with_anything_in_them_are_refused(value: Any, place: str) -> None:
    good = pack(torch.ones(3))
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    holder = (
        header["__metadata__"]
        if place in header["__metadata__"]
        else header["model"]
        if place in header["model"]
        else header
    )
    before = holder.get(place)
    holder[place] = value
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + good[8 + length :]
    if value == before and type(value) is type(before):
        return
    assert refusal(unpack, data, WANTED)


def test_overlapping_tensors_are_refused() -> None:
    good = file({"model": ("F32", [3], raw(1, 2, 3)), "more": ("F32", [3], raw(1, 2, 3))})
    length = int.from_bytes(good[:8], "little")
    header = good[8 : 8 + length].replace(b"[12, 24]", b"[00, 12]").replace(b"[00", b"[ 0")
    assert refusal(unpack, good[:8] + header + good[8 + length :], WANTED) == "malformed"


def test_another_digest_encoding_or_size_than_announced() -> None:
    data = pack(ONE)
    assert refusal(unpack, data, expect(ONE, digest="0" * 64)) == "digest"
    assert refusal(unpack, data, expect(ONE, encoding="bf16")) == "encoding"
    assert refusal(unpack, data, Expect(99)) == "size"
    assert refusal(unpack, data, Expect(100, rows=1)) == "shape"
    assert refusal(unpack, pack(torch.zeros(2, 100)), Expect(100, rows=3)) == "shape"
    assert refusal(unpack, bytes(10_000), Expect(100)) == "too_large"


def test_norms_beyond_the_reference_are_refused() -> None:
    """The bound is 1000 times the reference, and of several models each counts."""
    model = torch.tensor([3.0, 4.0])
    data = pack(model)
    assert unpack(data, expect(model, reference_norm=1.0)).tolist() == [3, 4]
    assert refusal(unpack, pack(model * 1001), expect(model, reference_norm=5.0)) == "norm"
    assert unpack(pack(model * 999), expect(model, reference_norm=5.0)).tolist() == (model * 999).tolist()
    bank = torch.stack([model, model * 1001])
    assert refusal(unpack, pack(bank), expect(bank, reference_norm=5.0)) == "norm"
    huge = torch.full((4,), 1e30)  # finite, but not its square
    assert refusal(unpack, pack(huge), expect(huge, reference_norm=5.0)) == "norm"
    assert torch.equal(unpack(pack(huge), expect(huge)), huge)


@pytest.mark.parametrize("lie", ["none", "small", "large"])
def test_decompression_is_bounded(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of zeros in 32 kB: refused by the size that the frame states; one that lies or is silent, too."""
    made = zstandard.ZstdCompressor(write_content_size=lie != "none").compress(bytes(50_000_000))
    if lie == "small":  # the four bytes after magic and descriptor state 50,000,000
        at = made.index((50_000_000).to_bytes(4, "little"))
        made = made[:at] + (500).to_bytes(4, "little") + made[at + 4 :]
    assert refusal(unpack, made, Expect(100)) in ("too_large", "compression")


def test_bytes_after_a_compressed_model_are_refused() -> None:
    data = pack(torch.zeros(5000), compress=True)
    assert data[:4] == payload._MAGIC
    assert refusal(unpack, data + b"\0", Expect(5000)) == "compression"
    assert refusal(unpack, data + data, Expect(5000)) == "compression"
    assert refusal(unpack, data[:-1], Expect(5000)) == "compression"


def test_the_payload_of_a_codec_travels_as_it_is_and_is_as_long_as_declared() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    declared = Expect(200, torch.uint8, encoding="coded")
    assert torch.equal(unpack(pack(data, "coded"), declared), data)
    for wrong in (pack(data[:-1], "coded"), pack(ONE), b"coded"):
        with pytest.raises(Refused):
            unpack(wrong, declared)
    with pytest.raises(Refused):  # bytes in the place of a model
        unpack(pack(data, "coded"), Expect(200))
    with pytest.raises(Refused):
        pack(data, "float32")
