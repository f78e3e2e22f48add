from pathlib import Path

import msgspec
import pytest

from quantd.daemon.config import SYSTEM_SOCKET, EngineOptions, Paths, ServeConfig, client_sockets, load_config
from quantd.daemon.errors import ConfigError
from quantd.daemon.settings import settings_of, size
from quantd.engine.config import EngineConfig

HOME = {"HOME": "/home/ann"}


def test_xdg_folders_by_default() -> None:
    paths = Paths.from_env(HOME | {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_CACHE_HOME": "relative"}, uid=7)
    assert paths == Paths(
        models=Path("/home/ann/.local/share/quantd/models"),
        cache=Path("/home/ann/.cache/quantd"),
        state=Path("/home/ann/.local/state/quantd"),
        socket=Path("/run/user/7/quantd/api.sock"),
        config=Path("/home/ann/.config/quantd/quantd.toml"),
    )


def test_socket_of_root_and_of_a_user_without_a_runtime_folder() -> None:
    assert Paths.from_env(HOME | {"XDG_RUNTIME_DIR": "/run/user/0"}, uid=0).socket == SYSTEM_SOCKET
    assert Paths.from_env(HOME, uid=7).socket == Path("/home/ann/.local/state/quantd/run/api.sock")


def test_home_holds_everything() -> None:
    paths = Paths.from_env(HOME | {"QUANTD_HOME": "/q", "XDG_DATA_HOME": "/x"}, uid=7)
    assert {
        path.parts[1] for path in (paths.models, paths.cache, paths.state, paths.socket, paths.config)
    } == {"q"}


def test_clients_look_at_the_users_socket_then_the_systems() -> None:
    env = HOME | {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert client_sockets("/s", env) == [Path("/s")]
    assert client_sockets(None, env | {"QUANTD_SOCKET": "/e"}) == [Path("/e")]
    assert client_sockets(None, env)[-1] == SYSTEM_SOCKET
    assert client_sockets(None, env | {"QUANTD_HOME": "/q"}) == [Path("/q/run/api.sock")]


def test_defaults_are_those_of_the_engine() -> None:
    config = load_config({}, env={"QUANTD_HOME": "/nowhere"})
    assert config.socket == Path("/nowhere/run/api.sock")
    assert (config.host, config.port) == ("127.0.0.1", 11435)
    assert config.engine.for_model(Path("/m"), Path("/k")) == EngineConfig(model_path="/m", kernel_cache="/k")


def test_every_engine_option_is_a_field_of_the_engine() -> None:
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    assert settings_of(EngineOptions).keys() <= fields
    assert not settings_of(EngineOptions).keys() & settings_of(ServeConfig).keys()


def test_flag_beats_variable_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "quantd.toml"
    file.write_text('socket = "/file"\nport = 1\nhost = "::1"\n[engine]\nkv_dtype = "fp16"\nthreads = 3\n')
    env = {"QUANTD_HOME": str(tmp_path), "QUANTD_SOCKET": "/env"}
    assert load_config({}, env={"QUANTD_HOME": str(tmp_path)}).socket == Path("/file")
    config = load_config({"port": "off", "kv_dtype": "q8_0", "host": None}, env=env)
    assert (config.socket, config.port, config.host) == (Path("/env"), None, "::1")
    assert (config.engine.kv_dtype, config.engine.threads) == ("int8", 3)
    assert load_config({"socket": "/flag"}, env=env).socket == Path("/flag")


def test_a_named_file_is_read_in_place_of_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "quantd.toml").write_text("port = 1")
    other = tmp_path / "other.toml"
    other.write_text("port = 2")
    env = {"QUANTD_HOME": str(tmp_path)}
    assert load_config({}, env=env).port == 1
    assert load_config({}, env=env | {"QUANTD_CONFIG": str(other)}).port == 2
    assert load_config({}, file=other, env=env).port == 2


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("prot = 1", "quantd.toml: prot: no such key; did you mean port?"),
        (
            "zzz = 1",
            "known keys: socket, host, port, model, drain_seconds, keep_alive, hang_seconds, pin, "
            "max_models, max_memory, memory_wait",
        ),
        ("[engine]\nkv_dtyp = 1", "quantd.toml: engine.kv_dtyp: no such key; did you mean kv_dtype?"),
        ("[engine]\nkv_dtype = 'q9'", "engine.kv_dtype: 'q9' is not accepted; use one of int8, fp16"),
        ("[engine]\nsplit = '1,x'", "engine.split: '1,x' is not accepted; use auto, or shares such as 3,1"),
        ("[engine]\ntp = 0", "engine.tp: 0 is not accepted; use a whole number from 1 to 64"),
        ("port = true", "port: True is not accepted; use 0 to 65535"),
        ("port = 65536", "port: 65536 is not accepted"),
        ("engine = 3", "engine must be a table"),
        ("port = ", "not valid TOML"),
        ("drain_seconds = nan", "drain_seconds: nan is not accepted"),
        ("drain_seconds = -1", "drain_seconds: -1 is not accepted"),
        ("keep_alive = '5 d'", "keep_alive: '5 d' is not accepted; use seconds, or a time such as 15m"),
        ("[limits]\nmax_queue = 1.5", "limits.max_queue: 1.5 is not accepted; use a whole number from 1"),
        ("model = ''", "model: '' is not accepted"),
        ("[engine]\nprefix_caching = 1", "engine.prefix_caching: 1 is not accepted; use true or false"),
    ],
)
def test_bad_files_are_refused_by_key(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "quantd.toml").write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_config({}, env={"QUANTD_HOME": str(tmp_path)})
    assert message in str(caught.value)
    assert str(tmp_path / "quantd.toml") in str(caught.value)


def test_bad_flags_and_missing_files_are_named(tmp_path: Path) -> None:
    env = {"QUANTD_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="--kv-memory: '3 apples' is not accepted; use bytes, or a size"):
        load_config({"kv_memory": "3 apples"}, env=env)
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        load_config({}, file=tmp_path / "gone.toml", env=env)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("10B", 10),
    ],
)
def test_sizes(written: object, num_bytes: int) -> None:
    assert size().parse(written) == num_bytes


@pytest.mark.parametrize("written", ["", "-1", "0", "1e3", "G", "1GG", True, None, -5])
def test_bad_sizes(written: object) -> None:
    with pytest.raises(ValueError):
        size().parse(written)
