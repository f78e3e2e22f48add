"""Agents: Cline, Aider, opencode, Codex, Claude Code.

Their `own_tokens` are a quarter of the bytes of a first request, in the versions of November 2026.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders, first_there
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, MESSAGES, RESPONSES
from quantd.daemon.connect.tool import Tool

# Cline wants to know when an entry was saved; one fixed moment, so that a second write is no change.
_SAVED = "1970-01-01T00:00:00.000Z"


def _cline_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """What `cline auth` writes; StoredProviderSettings of @cline/core. The extension reads the same file."""
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": endpoint.any_key,
        "model": endpoint.model,
        "baseUrl": endpoint.v1,
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.max_output,
    }
    puts = [
        Put(("version",), 1, "frame"),
        Put(
            ("lastUsedProvider",),
            provider,
            "choice",
            "choose OpenAI Compatible as the API provider in Cline's settings",
        ),
        Put(("providers", provider, "settings"), settings),
        Put(("providers", provider, "updatedAt"), _SAVED, "stamp"),
        Put(("providers", provider, "tokenSource"), "manual", "stamp"),
    ]
    folder = folders.named_by("CLINE_DATA_DIR", ".cline/data")
    return [ConfigFile(folder / "settings" / "providers.json", "json", puts)]


def _cline_steps(endpoint: Endpoint) -> Sequence[str]:
    return (
        f"By hand instead, in Cline's settings: API Provider OpenAI Compatible, Base URL {endpoint.v1}, "
        f"API Key {endpoint.any_key}, Model ID {endpoint.model}, Context Window Size {endpoint.context}.",
    )


def _aider_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """aider.chat/docs/config: aider_conf, adv-model-settings. Aider looks for both in the home directory."""
    name = f"openai/{endpoint.model}"
    settings = [
        Put(("openai-api-base",), endpoint.v1),
        Put(("openai-api-key",), endpoint.any_key),
        Put(("model",), name, "choice", f"start it with aider --model {name}"),
    ]
    limits = {
        "max_tokens": endpoint.max_output,
        "max_input_tokens": endpoint.context,
        "max_output_tokens": endpoint.max_output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return [
        ConfigFile(folders.home / ".aider.conf.yml", "yaml", settings),
        ConfigFile(folders.home / ".aider.model.metadata.json", "json", [Put((name,), limits)]),
    ]


def _opencode_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """opencode.ai/docs/providers: custom provider"""
    folder = folders.config / "opencode"
    limit = {"context": endpoint.context, "output": endpoint.max_output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "quantd",
        "options": {"baseURL": endpoint.v1} | ({"apiKey": endpoint.key} if endpoint.key else {}),
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
    }
    name = f"quantd/{endpoint.model}"
    puts = [
        Put(("$schema",), "https://opencode.ai/config.json", "frame"),
        Put(("provider", "quantd"), provider),
        Put(("model",), name, "choice", f"start it with opencode -m {name}, or choose with /models"),
    ]
    return [ConfigFile(first_there(folder / "opencode.json", folder / "opencode.jsonc"), "json", puts)]


def _codex_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """A profile, which codex --profile lays over config.toml. "responses" is all that Codex speaks."""
    provider = {"name": "quantd", "base_url": endpoint.v1, "wire_api": "responses"}
    if endpoint.key is not None:
        provider["experimental_bearer_token"] = endpoint.key
    puts = [
        Put(("model",), endpoint.model),
        Put(("model_provider",), "quantd"),
        Put(("model_context_window",), endpoint.context),
        Put(("model_providers", "quantd"), provider),
    ]
    return [ConfigFile(folders.named_by("CODEX_HOME", ".codex") / "quantd.config.toml", "toml", puts)]


def _claude_code_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """code.claude.com/docs: settings, env-vars.

    The attribution header is a text at the head of each prompt that changes each time, which would leave the
    daemon nothing to reuse.
    """
    aliases = ("OPUS", "SONNET", "HAIKU", "FABLE")
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.root,
        "ANTHROPIC_AUTH_TOKEN": endpoint.any_key,
        "ANTHROPIC_MODEL": endpoint.model,
        **{f"ANTHROPIC_DEFAULT_{alias}_MODEL": endpoint.model for alias in aliases},
        "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    path = folders.named_by("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    return [ConfigFile(path, "json", [Put(("env",), variables)])]


AGENTS = (
    Tool(
        name="cline",
        title="Cline: agent in VS Code, JetBrains and the terminal",
        reads="~/.cline/data/settings/providers.json",
        probes=(CHAT,),
        own_tokens=6_000,
        files=_cline_files,
        steps=_cline_steps,
    ),
    Tool(
        name="aider",
        title="Aider: pair programming in the terminal",
        reads="~/.aider.conf.yml, ~/.aider.model.metadata.json",
        probes=(CHAT,),
        files=_aider_files,
    ),
    Tool(
        name="opencode",
        title="opencode: agent in the terminal",
        reads="~/.config/opencode/opencode.json",
        probes=(CHAT,),
        own_tokens=8_000,
        files=_opencode_files,
    ),
    Tool(
        name="codex",
        title="Codex: agent in the terminal",
        reads="a profile of ours, ~/.codex/quantd.config.toml",
        probes=(RESPONSES,),
        own_tokens=10_000,
        files=_codex_files,
        steps=lambda endpoint: (
            "Start it with: codex --profile quantd",
            f"It says that it has no metadata for {endpoint.model}; that does not matter.",
        ),
    ),
    Tool(
        name="claude-code",
        title="Claude Code: agent in the terminal",
        reads="~/.claude/settings.json",
        probes=(MESSAGES,),
        own_tokens=20_000,
        files=_claude_code_files,
        steps=lambda endpoint: (
            "Start claude; /status shows the address. --undo gives you your account back.",
        ),
    ),
)
