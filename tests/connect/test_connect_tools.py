"""Each program's files, read by a parser of their format, hold what that program looks for in them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import json5
import lupa
import pytest
import sexpdata
from ruamel.yaml import YAML
from waiting import PATIENCE

from quantd.daemon.capabilities import Capabilities
from quantd.daemon.connect.edit import ConfigFile, undo, write
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.journal import Journal
from quantd.daemon.connect.tools import TOOLS
from quantd.daemon.connect.tools.editors import PROMPT_FORMATS
from quantd.daemon.errors import ConfigError
from quantd.daemon.infill_formats import FORMATS as INFILL_FORMATS

ROOT = "http://127.0.0.1:11435"
V1 = f"{ROOT}/v1"
CODER = Capabilities(chat=True, tools=True, thinking=False, infill="Qwen coder")
CHATTER = Capabilities(chat=True, tools=False, thinking=False, infill=None)
ENDPOINT = Endpoint("127.0.0.1", 11435, "qwen/coder-1.5b:q4", 32768, CODER, answers=True, is_loaded=True)
KEYED = dataclasses.replace(ENDPOINT, key="sk-of_mine")
AGENTS = ["cline", "aider", "opencode", "codex", "claude-code"]
EDITORS = [
    "continue",
    "zed",
    "llama.vim",
    "llama.vscode",
    "minuet",
    "codecompanion",
    "avante",
    "gptel",
    "ellama",
]
NAMES = [*EDITORS, *AGENTS, "copilot", "jetbrains", "open-webui", "tabby"]


@pytest.fixture
def folders(tmp_path: Path) -> UserFolders:
    return UserFolders({"HOME": str(tmp_path)})


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "state")


def lua(text: str) -> Any:
    """What a Lua chunk returns, in Python's types; functions stay."""

    def plain(value: Any) -> Any:
        if lupa.lua_type(value) != "table":
            return value
        return {key: plain(item) for key, item in value.items()}

    return plain(lupa.LuaRuntime(unpack_returned_tuples=True).execute(text))


def elisp(text: str) -> list[Any]:
    """The forms of a file, symbols as plain words."""

    def plain(form: Any) -> Any:
        if isinstance(form, list):
            return [plain(item) for item in form]
        if isinstance(form, sexpdata.Quoted):
            return ["quote", plain(form.x)]
        return form.value() if isinstance(form, sexpdata.Symbol) else form

    return [plain(form) for form in sexpdata.parse(text, nil=None, true=None)]


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "json": json.loads,
    "yaml": lambda text: YAML(typ="safe", pure=True).load(text),
    "toml": tomllib.loads,
    "elisp": elisp,
}


def files_of(name: str, folders: UserFolders, endpoint: Endpoint = ENDPOINT) -> list[ConfigFile]:
    return list(TOOLS[name].files(endpoint, folders))


def written(
    name: str, folders: UserFolders, journal: Journal, endpoint: Endpoint = ENDPOINT
) -> dict[str, Any]:
    """What stands in each file after --write, by its path below the home."""
    files = files_of(name, folders, endpoint)
    write(name, files, journal, replace=False)
    read = {file.path: file.path.read_text() for file in files}
    assert read == {file.path: file.preview() for file in files}
    parsers = {**PARSERS, "own": lua if name != "llama.vim" else str}
    return {str(file.path.relative_to(folders.home)): parsers[file.format](read[file.path]) for file in files}


def test_all_of_them_are_known() -> None:
    assert sorted(TOOLS) == sorted(NAMES)
    assert all(tool.title and tool.reads and tool.probes for tool in TOOLS.values())


@pytest.mark.parametrize("name", NAMES)
def test_write_is_idempotent_and_undone(name: str, folders: UserFolders, journal: Journal) -> None:
    files = files_of(name, folders)
    if not files:
        assert TOOLS[name].variables(ENDPOINT) or TOOLS[name].steps(ENDPOINT)
        return
    assert {outcome.done for outcome in write(name, files, journal, replace=False)} == {"written"}
    assert {outcome.done for outcome in write(name, files, journal, replace=False)} == {"has it already"}
    undo(name, journal)
    assert list(folders.home.rglob("*")) == [folders.home / "state"]


@pytest.mark.parametrize("name", NAMES)
def test_another_model_takes_the_place_of_the_first(
    name: str, folders: UserFolders, journal: Journal
) -> None:
    other = dataclasses.replace(ENDPOINT, model="other", max_model_len=8192)
    if files := files_of(name, folders):
        write(name, files, journal, replace=False)
        write(name, files_of(name, folders, other), journal, replace=False)
    assert all(
        file.path.read_text() == file.preview() and "coder" not in file.path.read_text()
        for file in files_of(name, folders, other)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_told_where_there_is_one(name: str, folders: UserFolders, journal: Journal) -> None:
    def told(endpoint: Endpoint) -> str:
        texts = [file.preview() for file in files_of(name, folders, endpoint)]
        tool = TOOLS[name]
        return str([*texts, tool.variables(endpoint), tool.steps(endpoint), tool.probes[0].line(endpoint)])

    assert str(KEYED.key) in told(KEYED) and str(KEYED.key) not in told(ENDPOINT)
    assert f"Authorization: Bearer {KEYED.key}" in told(KEYED) and "Bearer" not in told(ENDPOINT)
    files = files_of(name, folders, KEYED)
    if files:
        write(name, files, journal, replace=False)
        modes = {path.stat().st_mode & 0o777 for path in folders.home.rglob("*") if path.is_file()}
        assert modes == {0o600}


def test_the_fields_that_keys_have(folders: UserFolders, journal: Journal) -> None:
    def of(name: str) -> Any:
        [read] = written(name, folders, journal, KEYED).values()
        return read

    key = KEYED.key
    assert set(TOOLS["zed"].variables(KEYED)) == {
        "OLLAMA_API_KEY",
        "ZED_OPEN_AI_COMPATIBLE_EDIT_PREDICTION_API_KEY",
    }
    assert of("codex")["model_providers"]["quantd"]["experimental_bearer_token"] == key
    assert of("opencode")["provider"]["quantd"]["options"] == {"baseURL": V1, "apiKey": key}
    assert of("claude-code")["env"]["ANTHROPIC_AUTH_TOKEN"] == key
    assert [model["apiKey"] for model in of("continue")["models"]] == [key, key]
    fields = {name for name, value in of("llama.vscode").items() if value == key}
    assert fields == {f"llama-vscode.{name}" for name in ("api_key", "api_key_chat", "api_key_tools")}
    assert of("copilot")[0]["apiKey"] == key
    assert of("avante")["opts"]["providers"]["quantd"]["api_key_name"] == f"cmd:echo {key}"
    assert of("ellama")[0][-1][2][:3] == ["make-llm-ollama-authed", ":key", key]


def test_zed(folders: UserFolders, journal: Journal) -> None:
    settings = written("zed", folders, journal)[".config/zed/settings.json"]
    assert settings["language_models"]["ollama"] == {"api_url": ROOT, "context_window": 32768}
    assert settings["agent"]["default_model"] == {"provider": "ollama", "model": ENDPOINT.model}
    bare = files_of("zed", folders, dataclasses.replace(ENDPOINT, model="tiny"))[0].preview()
    assert json.loads(bare)["agent"]["default_model"]["model"] == "tiny:latest"
    assert settings["edit_predictions"] == {
        "provider": "open_ai_compatible_api",
        "open_ai_compatible_api": {
            "api_url": f"{V1}/completions",
            "model": ENDPOINT.model,
            "prompt_format": "qwen",
            "max_output_tokens": 64,
        },
    }


def test_zed_knows_the_layouts_by_its_own_names() -> None:
    assert PROMPT_FORMATS.keys() <= {format.family for format in INFILL_FORMATS}


def test_zed_keeps_comments_and_choices(folders: UserFolders, journal: Journal) -> None:
    path = folders.config / "zed" / "settings.json"
    path.parent.mkdir(parents=True)
    theirs = (
        '// mine\n{\n  "vim_mode": true, // yes\n'
        '  "edit_predictions": {"provider": "copilot", "mode": "subtle"},\n'
        '  "agent": {"default_model": {"provider": "zed.dev", "model": "x"}},\n}\n'
    )
    path.write_text(theirs)
    outcome = write("zed", files_of("zed", folders), journal, replace=False)[0]
    assert [kept.split(" stays ")[0] for kept in outcome.kept] == [
        "agent.default_model",
        "edit_predictions.provider",
    ]
    text = path.read_text()
    assert text.startswith('// mine\n{\n  "vim_mode": true, // yes\n')
    settings = json5.loads(text)
    assert settings["edit_predictions"]["provider"] == "copilot"
    assert settings["edit_predictions"]["mode"] == "subtle"
    assert settings["edit_predictions"]["open_ai_compatible_api"]["model"] == ENDPOINT.model
    undo("zed", journal)
    assert path.read_text() == theirs


def test_continue(folders: UserFolders, journal: Journal) -> None:
    config = written("continue", folders, journal)[".continue/config.yaml"]
    assert [config[key] for key in ("name", "version", "schema")] == ["Local Config", "1.0.0", "v1"]
    chat, completion = config["models"]
    assert (chat["provider"], chat["model"], chat["apiBase"]) == ("openai", ENDPOINT.model, V1)
    assert chat["roles"] == ["chat", "edit", "apply"] and chat["capabilities"] == ["tool_use"]
    assert chat["defaultCompletionOptions"] == {"contextLength": 32768, "maxTokens": 8192}
    assert (completion["provider"], completion["apiBase"]) == ("ollama", ROOT)
    assert completion["roles"] == ["autocomplete"]


def test_continue_is_added_to_the_models_that_are_there(folders: UserFolders, journal: Journal) -> None:
    path = folders.home / ".continue" / "config.yaml"
    path.parent.mkdir()
    theirs = (
        "name: Mine # my own\nversion: 2.0.0\nschema: v1\n"
        "models:\n- name: GPT # paid\n  model: gpt\n\n# rules\nrules: []\n"
    )
    path.write_text(theirs)
    write("continue", files_of("continue", folders), journal, replace=False)
    text = path.read_text()
    head, tail = theirs.split("\n\n# rules")
    assert text.startswith(head + "\n- name: quantd") and text.endswith("\n\n# rules" + tail)
    config = PARSERS["yaml"](text)
    assert [model["name"].split()[0] for model in config["models"]] == ["GPT", "quantd", "quantd"]
    assert (config["name"], config["version"]) == ("Mine", "2.0.0")
    undo("continue", journal)
    assert path.read_text() == theirs


def test_continue_is_not_given_a_file_that_hides_its_old_one(folders: UserFolders, journal: Journal) -> None:
    old = folders.home / ".continue" / "config.json"
    old.parent.mkdir()
    old.write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        write("continue", files_of("continue", folders), journal, replace=False)


def test_llama_vscode(folders: UserFolders, journal: Journal) -> None:
    settings = written("llama.vscode", folders, journal)[".config/Code/User/settings.json"]
    assert settings == {
        "llama-vscode.endpoint": ROOT,
        "llama-vscode.endpoint_chat": ROOT,
        "llama-vscode.endpoint_tools": ROOT,
        "llama-vscode.ai_model": ENDPOINT.model,
        "llama-vscode.ring_n_chunks": 16,
    }


def test_copilot(folders: UserFolders, journal: Journal) -> None:
    [entry] = written("copilot", folders, journal)[".config/Code/User/chatLanguageModels.json"]
    assert (entry["name"], entry["vendor"], entry["apiType"]) == (
        "quantd",
        "customendpoint",
        "chat-completions",
    )
    [model] = entry["models"]
    assert (model["id"], model["url"]) == (ENDPOINT.model, f"{V1}/chat/completions")
    assert model["maxInputTokens"] + model["maxOutputTokens"] == 32768
    assert (model["toolCalling"], model["vision"]) == (True, False)


def test_cline(folders: UserFolders, journal: Journal) -> None:
    stored = written("cline", folders, journal)[".cline/data/settings/providers.json"]
    assert (stored["version"], stored["lastUsedProvider"]) == (1, "openai-compatible")
    entry = stored["providers"]["openai-compatible"]
    settings = {"provider": "openai-compatible", "apiKey": "quantd", "model": ENDPOINT.model, "baseUrl": V1}
    assert entry["settings"] == settings | {"contextWindow": 32768, "maxTokens": 8192}
    assert entry["tokenSource"] == "manual" and entry["updatedAt"].endswith("Z")


def test_aider(folders: UserFolders, journal: Journal) -> None:
    files = written("aider", folders, journal)
    name = f"openai/{ENDPOINT.model}"
    assert files[".aider.conf.yml"] == {"openai-api-base": V1, "openai-api-key": "quantd", "model": name}
    limits = files[".aider.model.metadata.json"][name]
    assert (limits["max_input_tokens"], limits["litellm_provider"], limits["mode"]) == (
        32768,
        "openai",
        "chat",
    )


def test_opencode(folders: UserFolders, journal: Journal) -> None:
    config = written("opencode", folders, journal)[".config/opencode/opencode.json"]
    provider = config["provider"]["quantd"]
    assert (provider["npm"], provider["options"]) == ("@ai-sdk/openai-compatible", {"baseURL": V1})
    assert provider["models"][ENDPOINT.model]["limit"] == {"context": 32768, "output": 8192}
    assert config["model"] == f"quantd/{ENDPOINT.model}"


def test_codex(folders: UserFolders, journal: Journal) -> None:
    profile = written("codex", folders, journal)[".codex/quantd.config.toml"]
    assert (profile["model"], profile["model_provider"]) == (ENDPOINT.model, "quantd")
    assert profile["model_context_window"] == 32768
    assert profile["model_providers"]["quantd"] == {"name": "quantd", "base_url": V1, "wire_api": "responses"}


def test_claude_code(folders: UserFolders, journal: Journal) -> None:
    env = written("claude-code", folders, journal)[".claude/settings.json"]["env"]
    assert env["ANTHROPIC_BASE_URL"] == ROOT and env["ANTHROPIC_AUTH_TOKEN"]
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    models = {value for key, value in env.items() if key.endswith("_MODEL")}
    assert models == {ENDPOINT.model} and all(isinstance(value, str) for value in env.values())
    assert (env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("32768", "8192")


def test_tabby(folders: UserFolders, journal: Journal) -> None:
    models = written("tabby", folders, journal)[".tabby/config.toml"]["model"]
    api = {"model_name": ENDPOINT.model, "api_endpoint": V1, "api_key": "quantd"}
    assert models["completion"]["http"] == {"kind": "openai/completion", **api}
    assert models["chat"]["http"] == {"kind": "openai/chat", **api}


def test_minuet(folders: UserFolders, journal: Journal) -> None:
    spec = written("minuet", folders, journal)[".config/nvim/lua/plugins/quantd-minuet.lua"]
    assert (spec[1], spec["optional"]) == ("milanglacier/minuet-ai.nvim", True)
    assert spec["opts"]["provider"] == "openai_fim_compatible"
    options = spec["opts"]["provider_options"]["openai_fim_compatible"]
    assert (options["end_point"], options["model"]) == (f"{V1}/completions", ENDPOINT.model)
    assert options["api_key"]() == "quantd"


def test_codecompanion(folders: UserFolders, journal: Journal) -> None:
    path = ".config/nvim/lua/plugins/quantd-codecompanion.lua"
    opts = written("codecompanion", folders, journal)[path]["opts"]
    assert {use["adapter"] for use in opts["interactions"].values()} == {"quantd"}
    # The adapter is made by a function, which gets the plugin's own module.
    text = (folders.home / path).read_text()
    runtime = lupa.LuaRuntime()
    runtime.execute(
        "package.preload['codecompanion.adapters'] ="
        " function() return {extend = function(name, adapter) return adapter end} end"
    )
    adapter = runtime.execute(text).opts.adapters.http.quantd()
    assert (adapter.env.url, adapter.env.chat_url) == (ROOT, "/v1/chat/completions")
    assert adapter.env.api_key() == "quantd"
    assert adapter.schema.model.default == ENDPOINT.model


def test_avante(folders: UserFolders, journal: Journal) -> None:
    opts = written("avante", folders, journal)[".config/nvim/lua/plugins/quantd-avante.lua"]["opts"]
    assert opts["provider"] == "quantd"
    provider = opts["providers"]["quantd"]
    assert (provider["__inherited_from"], provider["endpoint"], provider["model"]) == (
        "openai",
        V1,
        ENDPOINT.model,
    )
    assert (provider["context_window"], provider["api_key_name"]) == (32768, "")


def test_gptel(folders: UserFolders, journal: Journal) -> None:
    [form] = written("gptel", folders, journal)[".emacs.d/init.el"]
    load, package, setq = form
    assert (load, package[1], setq[0]) == ("with-eval-after-load", "gptel", "setq")
    values = dict(zip(setq[1::2], setq[2::2], strict=True))
    assert values["gptel-model"] == ["intern", ENDPOINT.model]
    maker, name, *rest = values["gptel-backend"]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    assert (maker, name) == ("gptel-make-openai", "quantd")
    assert (given[":protocol"], given[":host"]) == ("http", "127.0.0.1:11435")
    assert given[":models"] == ["list", ["intern", ENDPOINT.model]]


def test_ellama(folders: UserFolders, journal: Journal) -> None:
    [form] = written("ellama", folders, journal)[".emacs.d/init.el"]
    setq = form[-1]
    assert setq[:2] == ["setq", "ellama-provider"]
    maker, *rest = setq[2]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    assert maker == "make-llm-ollama"
    assert (given[":scheme"], given[":host"], given[":port"]) == ("http", "127.0.0.1", 11435)
    assert given[":chat-model"] == ENDPOINT.model


@pytest.mark.parametrize(
    "init", [".emacs", ".emacs.d/init.el", ".config/emacs/init.el", ".config/doom/config.el"]
)
def test_emacs_packages_share_the_init_file(init: str, folders: UserFolders, journal: Journal) -> None:
    path = folders.home / init
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("(setq a 1) ; mine\n")
    for name in ("gptel", "ellama"):
        write(name, files_of(name, folders), journal, replace=False)
    assert [form[0] for form in elisp(path.read_text())] == [
        "setq",
        "with-eval-after-load",
        "with-eval-after-load",
    ]
    undo("gptel", journal)
    assert len(elisp(path.read_text())) == 2
    undo("ellama", journal)
    assert path.read_text() == "(setq a 1) ; mine\n"


@pytest.mark.parametrize("editors", [[".vim"], [".config/nvim"], [".vim", ".config/nvim"], []])
def test_llama_vim_is_there_for_each_editor(
    editors: list[str], folders: UserFolders, journal: Journal
) -> None:
    for editor in editors:
        (folders.home / editor).mkdir(parents=True)
    files = written("llama.vim", folders, journal)
    assert sorted(files) == sorted(f"{editor}/plugin/quantd_llama.vim" for editor in editors or [".vim"])


@pytest.mark.skipif(shutil.which("vim") is None, reason="asks vim itself")
@pytest.mark.parametrize("mine", ["", "let g:llama_config = {'show_info': 0, 'endpoint_fim': 'x'}"])
def test_llama_vim_as_vim_reads_it(mine: str, folders: UserFolders, journal: Journal) -> None:
    [path] = written("llama.vim", folders, journal, KEYED)
    out = folders.home / "out.json"
    script = (
        f"{mine}\nsource {folders.home / path}\ncall writefile([json_encode(g:llama_config)], '{out}')\nqa!\n"
    )
    (folders.home / "run.vim").write_text(script)
    subprocess.run(
        ["vim", "-N", "-u", "NONE", "-i", "NONE", "-es", "-S", folders.home / "run.vim"],
        check=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )
    config = json.loads(out.read_text())
    assert config["endpoint_fim"] == f"{ROOT}/infill"
    assert config["endpoint_inst"] == f"{V1}/chat/completions"
    assert config["model_fim"] == config["model_inst"] == ENDPOINT.model
    assert config["api_key"] == KEYED.key
    assert ("show_info" in config) == bool(mine)


def test_open_webui_and_jetbrains_have_no_files(folders: UserFolders) -> None:
    assert TOOLS["open-webui"].variables(ENDPOINT) == {"OPENAI_API_BASE_URL": V1, "OPENAI_API_KEY": "quantd"}
    assert any(V1 in step for step in TOOLS["jetbrains"].steps(ENDPOINT))


def test_variables_move_the_files(tmp_path: Path) -> None:
    moved = {
        "CODEX_HOME": "codex",
        "CLAUDE_CONFIG_DIR": "claude-code",
        "CLINE_DATA_DIR": "cline",
        "CONTINUE_GLOBAL_DIR": "continue",
        "TABBY_ROOT": "tabby",
        "XDG_CONFIG_HOME": "zed",
    }
    folders = UserFolders({"HOME": str(tmp_path)} | {key: str(tmp_path / "at" / key) for key in moved})
    for variable, name in moved.items():
        assert all(file.path.is_relative_to(tmp_path / "at" / variable) for file in files_of(name, folders))


def test_a_model_that_cannot_infill_or_use_tools_is_not_said_to(
    folders: UserFolders, journal: Journal
) -> None:
    chatter = dataclasses.replace(ENDPOINT, capabilities=CHATTER)
    zed = written("zed", folders, journal, chatter)[".config/zed/settings.json"]
    assert "edit_predictions" not in zed
    [model] = written("continue", folders, journal, chatter)[".continue/config.yaml"]["models"]
    assert "capabilities" not in model
    assert list(written("tabby", folders, journal, chatter)[".tabby/config.toml"]["model"]) == ["chat"]
    [entry] = written("copilot", folders, journal, chatter)[".config/Code/User/chatLanguageModels.json"]
    assert entry["models"][0]["toolCalling"] is False


def test_a_context_that_nobody_knows_is_asked_for(folders: UserFolders) -> None:
    unknown = dataclasses.replace(ENDPOINT, max_model_len=None)
    with pytest.raises(ConfigError, match=rf"quantd load {ENDPOINT.model} first"):
        files_of("zed", folders, unknown)
    assert TOOLS["open-webui"].variables(unknown)


def test_an_ipv6_address_has_brackets_where_it_needs_them(folders: UserFolders) -> None:
    six = dataclasses.replace(ENDPOINT, host="::1")
    assert six.v1 == "http://[::1]:11435/v1"
    assert '"[::1]:11435"' in files_of("gptel", folders, six)[0].preview()
    assert ':host "::1"' in files_of("ellama", folders, six)[0].preview()
