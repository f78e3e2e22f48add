import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.safetensors_file import MAX_HEADER_BYTES, read_header, read_index, read_json


def sealed(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start: int, end: int, shape: list[int], dtype: str = "U8", **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_writes(path):
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(0, 7),
        "c": torch.tensor(4, dtype=torch.int64),
        "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    index = read_header(path)
    found = {name: (info.dtype, info.shape, info.nbytes) for name, info in index.items()}
    assert found == {
        "a": ("BF16", (3, 5), 30),
        "b": ("F32", (0, 7), 0),
        "c": ("I64", (), 8),
        "d": ("F8_E4M3", (2,), 2),
    }


def test_sub_byte_types_count_in_bits(path):
    path.write_bytes(sealed({"a": entry(0, 3, [6], "F4")}, bytes(3)))
    assert read_header(path)["a"].nbytes == 3


BAD = {
    "twice": (
        sealed(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        "twice",
    ),
    "twice within": (
        sealed(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "twice",
    ),
    "nothing": (b"", "too few"),
    "half a length": (b"\0" * 7, "too few"),
    "huge length": (struct.pack("<Q", 2**64 - 1) + b"{}", "limit"),
    "limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "limit"),
    "header cut": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "no JSON": (sealed(b"hello"), "damaged"),
    "bad UTF-8": (sealed(b'{"\xff": 1}'), "damaged"),
    "deep": (sealed(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "damaged"),
    "list": (sealed([]), "damaged"),
    "number for entry": (sealed({"a": 1}), "damaged"),
    "missing field": (sealed({"a": {"dtype": "U8", "shape": [1]}}, b"x"), "damaged"),
    "unknown field": (sealed({"a": entry(0, 1, [1], extra=1)}, b"x"), "damaged"),
    "float size": (sealed({"a": entry(0, 1, [1.5])}, b"x"), "damaged"),
    "negative size": (sealed({"a": entry(0, 1, [-1])}, b"x"), "damaged"),
    "size beyond 64 bits": (sealed({"a": entry(0, 1, [2**70])}, b"x"), "damaged"),
    "product beyond 64 bits": (sealed({"a": entry(0, 1, [2**40, 2**40])}, b"x"), "takes"),
    "many dimensions": (sealed({"a": entry(0, 1, [1] * 1000)}, b"x"), "damaged"),
    "unknown dtype": (sealed({"a": entry(0, 1, [1], "Q4")}, b"x"), "unknown dtype 'Q4'"),
    "shape against bytes": (sealed({"a": entry(0, 4, [3])}, b"xxxx"), "takes 3 bytes"),
    "overlap": (
        sealed({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"x" * 6),
        "expected it to begin at 4",
    ),
    "gap": (sealed({"a": entry(0, 4, [4]), "b": entry(5, 6, [1])}, b"x" * 6), "expected it to begin at 4"),
    "reversed": (sealed({"a": entry(0, 4, [4]), "b": entry(4, 2, [2])}, b"x" * 6), "damaged"),
    "data cut": (sealed({"a": entry(0, 4, [4])}, b"xxx"), "truncated: the header names 4 bytes"),
    "data added": (sealed({"a": entry(0, 4, [4])}, b"xxxxx"), "1 bytes follow"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_headers_are_refused(kind, path):
    data, message = BAD[kind]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def survives(path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        read_header(path)
    except CheckpointError:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_escape(tmp_path_factory, data, framed):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    survives(path, sealed(data) if framed else data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["U8", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.binary(max_size=16))
def test_random_json_never_escapes(tmp_path_factory, header, data):
    survives(tmp_path_factory.getbasetemp() / "json.safetensors", sealed(header, data))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=3)), min_size=1, max_size=4))
def test_mutated_headers_never_escape(tmp_path_factory, edits):
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 8, [2], "F32"), "b": entry(8, 12, [2, 2])}
    whole = bytearray(sealed(header, bytes(12)))
    for at, piece in edits:
        at %= len(whole)
        whole[at : at + len(piece)] = piece
    survives(tmp_path_factory.getbasetemp() / "mutated.safetensors", bytes(whole))


def write_shards(folder, weight_map=None):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = weight_map or {"a": first, "b": first, "c": second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_names_the_shards_and_strays_are_ignored(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"damaged")
    save_file({"a": torch.ones(9)}, tmp_path / "other.safetensors")
    index = read_index(tmp_path)
    assert {name: info.shape for name, info in index.items()} == {"a": (2,), "b": (3,), "c": (4,)}


def test_tensors_that_the_index_does_not_name_are_ignored(tmp_path):
    write_shards(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    assert list(read_index(tmp_path)) == ["a"]


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_index(tmp_path)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path):
    write_shards(tmp_path, {"z": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="tensor z is missing"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "", ".."]
)
def test_an_index_cannot_point_outside_the_folder(tmp_path, file):
    write_shards(tmp_path, {"a": file})
    with pytest.raises(CheckpointError, match="plain name"):
        read_index(tmp_path)


@pytest.mark.parametrize("weight_map", [[1], {"a": 1}, "x"])
def test_a_malformed_index_is_refused(tmp_path, weight_map):
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "gptq_model-4bit-128g.safetensors"])
def test_the_main_file_wins_over_strays(tmp_path, name):
    save_file({"a": torch.ones(2)}, tmp_path / name)
    save_file({"b": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert list(read_index(tmp_path)) == ["a"]


def test_any_single_file_will_do(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert list(read_index(tmp_path)) == ["a"]


def test_shards_without_an_index_are_refused(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no index"):
        read_index(tmp_path)


def test_pickles_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        read_index(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_index(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"a": "\\ud8', "\xff"])
def test_a_broken_json_file_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
