"""The reader against the safetensors library, and against files that lie about themselves."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxspec.errors import ModelFormatError
from jaxspec.loading import safetensors_reader
from jaxspec.loading.dequantise import dequantise
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.weight_reader import WeightReader
from pallas_kernels.quant.schemes import FP8_BLOCK

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).normal(size=shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 99),
)


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header at all."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return file


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@given(tensors=st.dictionaries(st.text("abc.", min_size=1, max_size=5), arrays, min_size=1, max_size=5))
def test_reads_what_the_library_writes(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("folder")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reader = SafetensorsReader(folder)
    assert set(reader.tensors) == set(tensors)
    for name, expected in tensors.items():
        got = reader.read(name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_reads_across_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel may return less than asked for (always above 2 GiB)."""

    class Slow:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def seek(self, n):
            self._file.seek(n)

        def readinto(self, buffer):
            return self._file.readinto(buffer[:7])

    expected = np.arange(100, dtype=np.float32)
    save_file({"x": expected}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    real_open = Path.open
    monkeypatch.setattr(safetensors_reader.Path, "open", lambda self, *a, **k: Slow(real_open(self, *a, **k)))
    np.testing.assert_array_equal(reader.read("x"), expected)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 8)}, b"\0" * 7, "truncated"),
        ({"a": entry(0, 8)}, b"\0" * 9, "after its last tensor"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12, "does not start where"),
        ({"a": entry(0, 8), "b": entry(9, 17)}, b"\0" * 17, "does not start where"),
        ({"a": entry(0, 4)}, b"\0" * 4, "has 4 bytes"),
        ({"a": entry(8, 0)}, b"", "malformed"),
        ({"a": entry(0, 8, shape=(-2,))}, b"\0" * 8, "malformed"),
        ({"a": entry(0, 8) | {"shape": [2.0]}}, b"\0" * 8, "malformed"),
        ({"a": {"dtype": "F32"}}, b"", "malformed"),
        ({"a": 1}, b"", "malformed"),
        ([], b"", "not a JSON object"),
        (b"{", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "occurs twice"),
    ],
)
def test_damaged_shards_are_refused(tmp_path: Path, header: Any, data: bytes, message: str):
    write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelFormatError, match=message) as error:
        SafetensorsReader(tmp_path)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(("length", "message"), [(2**63, "limit"), (100, "the file has"), (2**64 - 1, "limit")])
def test_header_length_is_checked_before_it_is_read(tmp_path: Path, length: int, message: str):
    write_raw(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(ModelFormatError, match=message):
        SafetensorsReader(tmp_path)


def test_file_shorter_than_a_header(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelFormatError, match="shorter than a header"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32])
def test_reads_into_an_array_of_the_dtype(tmp_path: Path, dtype: Any):
    """The array may have another shape; FP8 is read as bfloat16, and fills arrays of that."""
    rng = np.random.default_rng(0)
    tensors = {"x": rng.normal(size=(130, 260)).astype(dtype)}
    if dtype == ml_dtypes.float8_e4m3fn:
        tensors["x_scale_inv"] = rng.uniform(0.5, 2, FP8_BLOCK.scale_shape((130, 260))).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    reader = WeightReader(tmp_path)
    expected = reader.read("x")
    for other in (expected.dtype, np.float16):
        into = np.zeros((10, 13, 260), other)
        got = reader.read("x", into)
        assert (got is into) == (other == expected.dtype)
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def test_file_that_goes_away_while_it_is_read(tmp_path: Path):
    save_file({"x": np.zeros(100, np.float32)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors cannot be read at tensor x: No such file"):
        reader.read("x")


def test_file_that_shrinks_while_it_is_read(tmp_path: Path):
    save_file({"x": np.zeros(100, np.float32)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as f:
        f.truncate(200)
    with pytest.raises(ModelFormatError, match="ended inside tensor x"):
        reader.read("x")


def test_tensor_in_two_shards(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.zeros(2, np.float32)}, tmp_path / name)
    with pytest.raises(ModelFormatError, match=r"x is in both a\.safetensors and b\.safetensors"):
        SafetensorsReader(tmp_path)


def test_index_that_disagrees_with_the_shards(tmp_path: Path):
    for name in ("a", "b"):
        save_file({name: np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"places tensor b in a\.safetensors"):
        SafetensorsReader(tmp_path)


def test_unsupported_dtype_names_the_tensor(tmp_path: Path):
    save_file({"x": np.zeros(2, np.int8)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)  # known extras may have any dtype
    with pytest.raises(ModelFormatError, match="tensor x has dtype I8"):
        reader.read("x")


def test_fp8_formula():
    """Every block, partial ones included, against the definition in float64."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 2, size=FP8_BLOCK.scale_shape(weight.shape)).astype(np.float32)
    assert scale.shape == (2, 3)
    out = dequantise(weight, scale, FP8_BLOCK)
    for i, j in [(0, 0), (127, 128), (128, 127), (199, 299), (130, 256)]:
        exact = np.float32(weight[i, j]) * scale[i // 128, j // 128]
        assert out[i, j] == exact.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("scale_entry", "message"),
    [
        (None, r"scales x\.weight_scale_inv are missing"),
        (entry(0, 8, (2, 1)), r"F32 \[2, 1\]; .*\[2, 2\] for blocks"),
        (entry(0, 8, (2, 2), "I16"), r"I16 \[2, 2\]"),
    ],
)
def test_fp8_scales_are_checked(tmp_path: Path, scale_entry: dict[str, Any] | None, message: str):
    size = scale_entry["data_offsets"][1] if scale_entry else 0
    header = {"x.weight": entry(size, size + 129 * 130, (129, 130), "F8_E4M3")}
    if scale_entry:
        header["x.weight_scale_inv"] = scale_entry
    write_raw(tmp_path / "model.safetensors", header, bytes(size + 129 * 130))
    with pytest.raises(ModelFormatError, match=message):
        WeightReader(tmp_path)
