"""The store: whole models or none, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fake_models import write_model
from gguf_files import write_tiny
from waiting import PATIENCE

from quantd.daemon.errors import ModelNotFoundError, StoreError
from quantd.daemon.sources.source import Progress
from quantd.daemon.store import Store, check_name
from quantd.daemon.tokenizer import Tokenizer
from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def safetensors_bytes(tensors: dict[str, int]) -> bytes:
    """A file of F32 vectors: name -> length."""
    header, at = {}, 0
    for name, length in tensors.items():
        header[name] = {"dtype": "F32", "shape": [length], "data_offsets": [at, at + 4 * length]}
        at += 4 * length
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def hf_folder(folder: Path, **config: object) -> Path:
    """A sharded model with everything, and things that must not come along."""
    write_model(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for tensor, shard in shards.items():
        (folder / shard).write_bytes(safetensors_bytes({tensor: 8}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for stray in ("pytorch_model.bin", "modeling_custom.py", "weights.pt", "README.md"):
        (folder / stray).write_text("stray")
    for part in ("1_Pooling", "onnx"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    return folder


def partials(store: Store) -> list[Path]:
    return list(store.root.glob(".partial-*"))


def test_an_empty_store_lists_nothing_and_says_how_to_begin(store: Store) -> None:
    assert store.list() == []
    with pytest.raises(ModelNotFoundError, match="quantd pull smollm2"):
        store.get("smollm2")


@pytest.mark.parametrize("copy", [False, True])
def test_a_gguf_file_becomes_a_model(store: Store, gguf_file: Path, copy: bool) -> None:
    before = time.time()
    model = store.import_path(gguf_file, copy=copy)
    assert (model.name, model.architecture, model.description) == ("tiny", "llama", "gguf Q8_0")
    assert model.bytes == gguf_file.stat().st_size
    assert before <= model.created <= time.time()
    assert store.list() == [model] == [store.get("tiny")]
    assert (model.path / "tiny.gguf").is_symlink() is not copy
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tensors.json", "quantd.json"):
        assert (model.path / name).is_file(), name
    store.remove("tiny")
    assert gguf_file.is_file()
    assert store.list() == []
    assert not model.path.exists()
    assert partials(store) == []


@pytest.mark.parametrize("copy", [False, True])
def test_a_folder_becomes_a_model_without_its_pickles_and_code(
    store: Store, tmp_path: Path, copy: bool
) -> None:
    source = hf_folder(tmp_path / "Some Model--7B")
    model = store.import_path(source, copy=copy)
    assert (model.name, model.architecture, model.description) == ("Some-Model-7B", "llama", "fp32 weights")
    assert json.loads((model.path / "1_Pooling" / "config.json").read_text())["pooling_mode"] == "cls"
    names = {path.name for path in model.path.iterdir()}
    assert {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "modeling_custom.py", "weights.pt", "README.md", "onnx"}
    assert all(path.is_symlink() is not copy for path in model.path.glob("*.safetensors"))
    store.remove(model.name)
    assert (source / "model-00001-of-00002.safetensors").is_file()


def test_code_that_comes_with_a_model_is_neither_taken_nor_run(store: Store, tmp_path: Path) -> None:
    names = {"AutoConfig": "modeling_custom.Config", "AutoTokenizer": ["modeling_custom.Tokenizer", None]}
    source = hf_folder(tmp_path / "coded", auto_map=names, trust_remote_code=True)
    (source / "modeling_custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit")
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"auto_map": names}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    model = store.import_path(source, copy=True)
    assert Tokenizer.load(model.path).encode("hi")
    assert not list(model.path.glob("*.py")) and not (tmp_path / "ran").exists()


def test_a_pickle_alone_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"pytorch_model\.bin: a pickle, which can run code"):
        store.import_path(tmp_path / "pytorch_model.bin")


def test_a_quantized_folder_says_how_it_is_quantized(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "gptq"
    write_model(source)
    for file in (FIXTURES / "autogptq-4b-g32-sym").iterdir():
        if file.name != "expected.safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    assert store.import_path(source).description == "gptq 4-bit g32"


def damage_missing_shard(source: Path) -> None:
    (source / "model-00002-of-00002.safetensors").unlink()


def damage_truncated(source: Path) -> None:
    shard = source / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])


def damage_no_config(source: Path) -> None:
    (source / "config.json").unlink()


def damage_no_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()


def damage_only_pickles(source: Path) -> None:
    for path in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        path.unlink()


def damage_method(source: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "magic"}}
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (damage_missing_shard, CheckpointError, "model-00002-of-00002.safetensors is missing"),
        (damage_truncated, CheckpointError, "model-00001-of-00002.safetensors: truncated"),
        (damage_no_config, CheckpointError, "config.json"),
        (damage_no_tokenizer, StoreError, "tokenizer.json is missing"),
        (damage_only_pickles, QuantdError, "no *.safetensors"),
        (damage_method, UnsupportedModelError, "'magic'"),
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_what_is_not_a_model_is_refused_and_leaves_nothing(
    store: Store, tmp_path: Path, damage: object, error: type[QuantdError], message: str, copy: bool
) -> None:
    source = hf_folder(tmp_path / "source")
    assert callable(damage)
    damage(source)
    with pytest.raises(error) as caught:
        store.import_path(source, copy=copy)
    assert message in str(caught.value)
    assert str(source) in str(caught.value)
    assert ".partial" not in str(caught.value)
    assert store.list() == []
    assert partials(store) == []


def test_a_truncated_gguf_is_refused_by_its_own_name(store: Store, gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as caught:
        store.import_path(gguf_file)
    assert str(caught.value).startswith(f"file:{gguf_file}: truncated")
    assert partials(store) == []


def test_things_that_are_no_models(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file or folder"):
        store.import_path(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(StoreError, match=r"give a \.gguf file or a folder"):
        store.import_path(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(StoreError, match="2 GGUF files"):
        store.import_path(tmp_path)


GOOD_NAMES = ["smollm2", "org/model", "Qwen2.5-7B_x", "a", "1-2"]
BAD_NAMES = [
    *("", ".", "..", ".hidden", "../up", "a/../b", "/etc/passwd", "a/b/c", "a//b", "a/", "/a", "a--b"),
    *("a b", "a\n", "a\x00b", "naïve", "-flag", "a/.b", "a\\b", "a:b:c", "x" * 97, "%2e%2e"),
]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(store: Store, gguf_file: Path, name: str) -> None:
    model = store.import_path(gguf_file, name)
    assert model.name == name
    assert model.path.parent == store.root
    assert [found.name for found in store.list()] == [name]


def test_names_as_users_of_ollama_write_them(store: Store, gguf_file: Path) -> None:
    assert store.import_path(gguf_file, "tiny:latest").name == "tiny"
    store.import_path(gguf_file, "org/tiny:q8_0")
    for written in ("tiny", "tiny:latest", "library/tiny", "registry.ollama.ai/library/tiny:latest"):
        assert store.get(written).name == "tiny"
    for written in ("org/tiny:q8_0", "hf.co/org/tiny:q8_0", "huggingface.co/org/tiny:q8_0"):
        assert store.get(written).name == "org/tiny:q8_0"
    for absent in ("org/tiny", "tiny:q8_0", "tiny:latest:latest"):
        with pytest.raises(ModelNotFoundError):
            store.get(absent)
    store.remove("hf.co/org/tiny:q8_0")
    assert [model.name for model in store.list()] == ["tiny"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_touch_nothing(store: Store, gguf_file: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a model"):
        check_name(name)
    with pytest.raises(StoreError):
        store.import_path(gguf_file, name)
    for call in (store.get, store.remove):
        with pytest.raises(ModelNotFoundError):
            call(name)
    assert not store.root.exists()


def test_an_unknown_name_hints_at_the_known_ones(store: Store, gguf_file: Path) -> None:
    store.import_path(gguf_file, "org/mistral-7b")
    with pytest.raises(ModelNotFoundError, match="did you mean 'org/mistral-7b'"):
        store.get("org/mistral-7")
    with pytest.raises(ModelNotFoundError, match="there are: org/mistral-7b"):
        store.get("zzz")


def test_the_same_source_again_changes_nothing_and_another_is_refused(
    store: Store, gguf_file: Path, tmp_path: Path
) -> None:
    model = store.import_path(gguf_file, "one")
    assert store.import_path(gguf_file, "one") == model
    write_tiny(tmp_path / "other.gguf")
    with pytest.raises(StoreError, match=r"from file:.*tiny\.gguf; choose another name"):
        store.import_path(tmp_path / "other.gguf", "one")
    assert store.get("one") == model


def test_a_folder_without_a_manifest_is_no_model_and_is_not_overwritten(
    store: Store, gguf_file: Path
) -> None:
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / "thesis.txt").write_text("precious")
    assert store.list() == []
    with pytest.raises(StoreError, match="in the way"):
        store.import_path(gguf_file)
    with pytest.raises(ModelNotFoundError, match=r"tiny is here, but has no quantd\.json"):
        store.get("tiny")
    assert (store.root / "tiny" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("manifest", ["", "{", '{"name": "elsewhere"}', "[]"])
def test_a_damaged_manifest_is_no_model(store: Store, gguf_file: Path, manifest: str) -> None:
    model = store.import_path(gguf_file)
    (model.path / "quantd.json").write_text(manifest)
    assert store.list() == []


@dataclass(frozen=True)
class SlowSource:
    """Copies a GGUF half by half, waiting in between; counts how often it is asked."""

    file: Path
    resumable: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    calls: list[list[str]] = field(default_factory=list)
    spec: str = "slow:tiny"
    default_name: str = "slow"

    def fetch(self, folder: Path, progress: Progress) -> None:
        self.calls.append(sorted(path.name for path in folder.iterdir()))
        data = self.file.read_bytes()
        with (folder / "tiny.gguf").open("wb") as out:
            out.write(data[: len(data) // 2])
            progress("downloading", len(data) // 2, len(data))
            assert self.go.wait(PATIENCE)
            out.write(data[len(data) // 2 :])


def test_nothing_is_listed_before_it_is_whole(store: Store, gguf_file: Path) -> None:
    source = SlowSource(gguf_file)
    half = threading.Event()
    thread = threading.Thread(target=store.add, args=(source, None, lambda *_: half.set()))
    thread.start()
    assert half.wait(PATIENCE)
    assert store.list() == []
    with pytest.raises(ModelNotFoundError):
        store.get("slow")
    source.go.set()
    thread.join(PATIENCE)
    assert [model.name for model in store.list()] == ["slow"]


def test_two_at_once_fetch_once(store: Store, gguf_file: Path) -> None:
    source = SlowSource(gguf_file)
    stages: list[str] = []
    waiting = threading.Event()
    found = []

    def second_progress(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)
        waiting.set()

    started = threading.Event()
    threads = [
        threading.Thread(target=lambda: found.append(store.add(source, None, lambda *_: started.set()))),
        threading.Thread(target=lambda: found.append(store.add(source, None, second_progress))),
    ]
    threads[0].start()
    assert started.wait(PATIENCE)
    threads[1].start()
    assert waiting.wait(PATIENCE)
    source.go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert stages == ["waiting"]
    assert len(source.calls) == 1
    assert found[0] == found[1]


class Impatient(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return False


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("resumable", [False, True])
def test_an_interrupted_fetch_leaves_only_what_it_can_resume(
    store: Store, gguf_file: Path, resumable: bool
) -> None:
    source = SlowSource(gguf_file, resumable)

    def interrupt(*_: object) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        store.add(source, None, interrupt)
    assert store.list() == []
    assert bool(partials(store)) is resumable
    source.go.set()
    store.add(source)
    assert source.calls == [[], ["tiny.gguf"] if resumable else []]
    assert [model.name for model in store.list()] == ["slow"]
    assert partials(store) == []


KILLED = """
import os, sys
from pathlib import Path
from quantd.daemon.store import Store

class Dying:
    spec, default_name, resumable = "dying:tiny", "tiny", False
    def fetch(self, folder, progress):
        (folder / "tiny.gguf").write_bytes(b"GGUF half")
        os._exit(9)

Store(Path(sys.argv[1])).add(Dying())
"""


def test_a_killed_fetch_is_no_model_and_is_cleaned_up(store: Store, gguf_file: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(store.root)], check=False)
    assert killed.returncode == 9
    assert len(partials(store)) == 1
    assert store.list() == []
    store.import_path(gguf_file, "tiny-other")
    assert partials(store) == []
    model = store.import_path(gguf_file, "tiny")
    assert store.get("tiny") == model


TERMINATED = """
import sys, time
from pathlib import Path
from quantd.daemon.endings import end_tidily
from quantd.daemon.store import Store

class Slow:
    spec, default_name, resumable = "slow:tiny", "tiny", False
    def fetch(self, folder, progress):
        (folder / "tiny.gguf").write_bytes(b"GGUF half")
        print("half", flush=True)
        time.sleep(600)

end_tidily()
Store(Path(sys.argv[1])).add(Slow())
"""


def test_a_fetch_that_is_told_to_end_leaves_nothing(store: Store) -> None:
    command = [sys.executable, "-c", TERMINATED, str(store.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        assert len(partials(store)) == 1
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert partials(store) == []


def test_a_fetch_that_nobody_goes_on_with_is_cleared_in_the_end(store: Store, gguf_file: Path) -> None:
    source = SlowSource(gguf_file, resumable=True)
    with pytest.raises(AssertionError):
        store.add(replace(source, go=Impatient()))
    (partial,) = partials(store)
    store.import_path(gguf_file, "other")
    assert partials(store) == [partial]
    os.utime(partial, (0, 0))
    with (store.root / ".locks" / "slow").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.import_path(gguf_file, "third")
        assert partials(store) == [partial], "one that is under way stays, however long it takes"
    store.import_path(gguf_file, "fourth")
    assert partials(store) == []


def test_the_store_imports_neither_torch_nor_numpy() -> None:
    heavy = "{'torch', 'numpy', 'gguf', 'tokenizers'}"
    code = f"import sys, quantd.daemon.store; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
