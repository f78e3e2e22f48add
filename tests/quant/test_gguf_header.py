"""The header parser against `gguf.GGUFReader`, and against files that lie."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish, write_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf_header import read_header
from quantd.quant.gguf_import import import_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path)
    return path


def test_every_value_type_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    for add, value in (
        (writer.add_uint8, 200),
        (writer.add_int8, -3),
        (writer.add_uint16, 65535),
        (writer.add_int16, -300),
        (writer.add_uint32, 2**32 - 1),
        (writer.add_int32, -(2**31)),
        (writer.add_uint64, 2**63),
        (writer.add_int64, -(2**62)),
        (writer.add_float32, 0.5),
        (writer.add_float64, 0.1),
        (writer.add_bool, True),
        (writer.add_string, "naïve 日本"),
    ):
        add(f"key.{add.__name__}", value)
    writer.add_array("key.strings", ["a", "", "ü"])
    writer.add_array("key.floats", [0.5, -1.5])
    writer.add_array("key.flags", [True, False])
    writer.add_tensor("blk.0.x", np.zeros((3, 64), np.float32))
    finish(writer)
    header = read_header(tmp_path / "values.gguf")
    reader = gguf.GGUFReader(tmp_path / "values.gguf")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.metadata[name] == field.contents(), name
    assert len(header.metadata) == 16
    assert header.tensors["blk.0.x"].shape == (3, 64)


def test_tensors_lie_where_the_gguf_package_finds_them(tiny: Path) -> None:
    header, reader = read_header(tiny), gguf.GGUFReader(tiny)
    assert len(header.tensors) == len(reader.tensors)
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.type, ours.offset, ours.nbytes) == (
            theirs.tensor_type.name,
            theirs.data_offset,
            theirs.n_bytes,
        )
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_name(tiny: Path, tmp_path: Path, part: float) -> None:
    data = tiny.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def patched(offset: int, value: bytes) -> Callable[[bytearray], None]:
    def patch(data: bytearray) -> None:
        data[offset : offset + len(value)] = value

    return patch


def replaced(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def patch(data: bytearray) -> None:
        at = data.index(old)
        data[at : at + len(old)] = new

    return patch


def after(name: bytes, skip: int, value: bytes) -> Callable[[bytearray], None]:
    """Overwrite what lies `skip` bytes behind `name`."""

    def patch(data: bytearray) -> None:
        at = data.index(name) + len(name) + skip
        data[at : at + len(value)] = value

    return patch


U64_MAX = struct.pack("<Q", 2**64 - 1)
LIES: dict[str, tuple[Callable[[bytearray], None], type[QuantdError], str]] = {
    "magic": (patched(0, b"GGML"), CheckpointError, "not a GGUF file"),
    "version": (patched(4, struct.pack("<I", 1)), UnsupportedModelError, "version 1"),
    "big-endian": (patched(4, struct.pack(">I", 3)), UnsupportedModelError, "version 50331648"),
    "tensor count": (patched(8, U64_MAX), CheckpointError, "tensors announced"),
    "entry count": (patched(16, U64_MAX), CheckpointError, "metadata entries announced"),
    "key length": (patched(24, U64_MAX), CheckpointError, "truncated"),
    "array length": (after(b"tokenizer.ggml.tokens", 8, U64_MAX), CheckpointError, "strings in"),
    "array type": (after(b"tokenizer.ggml.tokens", 4, b"\x09"), CheckpointError, "nested type 9"),
    "value type": (after(b"llama.block_count", 0, b"\x20"), CheckpointError, "type 32"),
    "not UTF-8": (after(b"general.architecture", 12, b"\xff\xfe"), CheckpointError, "not UTF-8"),
    "dimensions": (after(b"blk.0.attn_q.weight", 0, b"\x09"), CheckpointError, "9 dimensions"),
    "huge shape": (after(b"blk.0.attn_q.weight", 4, U64_MAX[:7] + b"\x0f"), CheckpointError, "attn_q"),
    "zero shape": (after(b"blk.0.attn_q.weight", 4, bytes(8)), CheckpointError, "does not fit Q8_0 blocks"),
    "unknown type": (after(b"blk.0.attn_q.weight", 20, b"\xc8"), UnsupportedModelError, "unknown type 200"),
    "unsupported": (after(b"blk.0.attn_q.weight", 20, b"\x14"), UnsupportedModelError, "IQ4_NL"),
    "offset": (after(b"blk.0.attn_q.weight", 24, U64_MAX), CheckpointError, "truncated: tensor"),
    "alignment": (after(b"blk.0.attn_q.weight", 24, b"\x01"), CheckpointError, "off the alignment"),
    "twice": (replaced(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), CheckpointError, "there twice"),
    "foreign": (replaced(b"blk.0.attn_k.weight", b"blk.0.attn_w.weight"), UnsupportedModelError, "attn_w"),
    "architecture": (after(b"general.architecture", 12, b"lemma"), UnsupportedModelError, "'lemma'"),
    "pre-tokenizer": (after(b"tokenizer.ggml.pre", 12, b"strudl"), UnsupportedModelError, "'strudl'"),
    "tokenizer": (after(b"tokenizer.ggml.model", 12, b"gpt9"), UnsupportedModelError, "'gpt9'"),
    "special id": (
        after(b"tokenizer.ggml.eos_token_id", 4, b"\xff\xff"),
        CheckpointError,
        "eos_token_id 65535 is past",
    ),
    "merge": (replaced(b"\xc4\xa0 t", b"\xc4\xa0 \t"), CheckpointError, "merge"),
    "layers": (after(b"llama.block_count", 4, b"\xff\xff\xff\xff"), CheckpointError, "blk.4294967294"),
    "missing key": (replaced(b"llama.block_count", b"llama.block_cOunt"), CheckpointError, "is missing"),
    "hidden size": (after(b"llama.embedding_length", 4, b"\x40"), CheckpointError, "embedding_length is 64"),
    "no heads": (after(b"llama.attention.head_count", 4, b"\x00"), CheckpointError, "head_count' is 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name(tiny: Path, tmp_path: Path, lie: str) -> None:
    patch, error, message = LIES[lie]
    data = bytearray(tiny.read_bytes())
    patch(data)
    (tmp_path / "liar.gguf").write_bytes(data)
    with pytest.raises(error) as caught:
        import_gguf(tmp_path / "liar.gguf", tmp_path / "model")
    assert "liar.gguf" in str(caught.value)
    assert message in str(caught.value)
    assert not (tmp_path / "model").exists()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_headers_import_or_are_refused(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes: either a folder or one of quantd's errors, never another exception."""
    original = tiny.read_bytes()
    header_len = min(tensor.offset for tensor in read_header(tiny).tensors.values())
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_len - 1))
        mutated[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutated)
    try:
        import_gguf(path, tmp_path / "model")
    except QuantdError as error:
        assert "mutated.gguf" in str(error)
