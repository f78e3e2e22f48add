"""The clients, as data: how each is started for one task without a terminal, and kept small and quiet.

The real model has 8192 tokens of context and the machine may be slow, so agents get short instructions and
no tools but harmless ones. What their switches do is said in their own help.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTIONS = "You are a helpful assistant. Answer in short sentences."


@dataclass(frozen=True)
class Place:
    """Where a client runs. home, project: folders of its own. installed: see install.py. root, key: of the
    daemon, its URL and what it asks for.
    """

    home: Path
    project: Path
    installed: Path
    root: str
    key: str
    model: str

    def npm(self, name: str) -> str:
        return str(self.installed / "npm" / "node_modules" / ".bin" / name)

    def venv(self, venv: str, name: str) -> str:
        return str(self.installed / venv / "bin" / name)


def _nothing(place: Place) -> None:
    pass


def _no_variables(place: Place) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Agent:
    """A client. package: its name in install.py. command: for a prompt. connects_as: what `quantd connect`
    calls it, if that can write its settings. tool: a harmless one, if it has any.
    """

    name: str
    package: str
    command: Callable[[Place, str], list[str]]
    connects_as: str | None = None
    tool: str | None = None
    prepare: Callable[[Place], None] = _nothing
    variables: Callable[[Place], Mapping[str, str]] = field(default=_no_variables)


def _claude(place: Place, prompt: str) -> list[str]:
    options = ["--bare", "--tools", "Read", "--system-prompt", INSTRUCTIONS, "--strict-mcp-config"]
    return [place.npm("claude"), "--print", *options, prompt]


def _codex(place: Place, prompt: str) -> list[str]:
    off = ["multi_agent", "shell_tool", "unified_exec", "view_image", "apps", "plugins", "skill_search"]
    off += ["computer_use", "daemon_auto_start", "shell_snapshot"]
    instructions = place.home / "instructions.md"
    instructions.write_text(INSTRUCTIONS)
    settings = {
        "model_instructions_file": json.dumps(str(instructions)),
        "web_search": '"disabled"',
        "analytics.enabled": "false",
        "check_for_update_on_startup": "false",
        "include_apps_instructions": "false",
        "include_permissions_instructions": "false",
        "include_collaboration_mode_instructions": "false",
        "include_environment_context": "false",
        "mcp_servers.notes.command": json.dumps(sys.executable),
        "mcp_servers.notes.args": json.dumps([str(Path(__file__).with_name("notes_server.py"))]),
    }
    command = [place.npm("codex"), "exec", "--profile", "quantd", "--skip-git-repo-check"]
    command += ["--sandbox", "read-only"]
    command += [word for name in off for word in ("--disable", name)]
    command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [*command, prompt]


def _opencode_variables(place: Place) -> Mapping[str, str]:
    agent = {"prompt": INSTRUCTIONS, "tools": {"*": False, "read": True}}
    settings = {"agent": {"build": agent, "title": {"disable": True}}, "share": "disabled"}
    switches = ("AUTOUPDATE", "MODELS_FETCH", "AUTOCOMPACT", "LSP_DOWNLOAD", "SHARE", "DEFAULT_PLUGINS")
    off = {f"OPENCODE_DISABLE_{name}": "1" for name in switches}
    return off | {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}


def _continue_variables(place: Place) -> Mapping[str, str]:
    return {"CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_METRICS_ENABLED": "0"}


def _continue(place: Place, prompt: str) -> list[str]:
    tools = ("Bash", "Fetch", "Checklist", "CheckBackgroundJob", "AskQuestion", "Exit", "Skills")
    excluded = [word for name in tools for word in ("--exclude", name)]
    return [place.npm("cn"), "--print", "--readonly", *excluded, prompt]


def _continue_fim(place: Place, prompt: str) -> list[str]:
    script = Path(__file__).with_name("continue_fim.mjs")
    modules = place.installed / "npm" / "node_modules"
    return ["node", str(script), str(modules), f"{place.root}/v1/", place.key, place.model, prompt]


def _cline(place: Place, prompt: str) -> list[str]:
    return [place.npm("cline"), "--plan", "--compaction", "off", "--system", INSTRUCTIONS, prompt]


def _aider(place: Place, prompt: str) -> list[str]:
    quiet = ["--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"]
    quiet += ["--analytics-disable", "--no-detect-urls", "--no-auto-lint", "--map-tokens", "0"]
    return [place.venv("aider", "aider"), *quiet, "--yes-always", "--message", prompt]


def _prepare_llm(place: Place) -> None:
    """llm.datasette.io: other-models, OpenAI-compatible models. YAML takes JSON."""
    entry = {"model_id": place.model, "model_name": place.model, "api_base": f"{place.root}/v1"}
    entry |= {"api_key_name": "quantd", "supports_tools": True}
    folder = Path(_llm_variables(place)["LLM_USER_PATH"])
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    (folder / "keys.json").write_text(json.dumps({"quantd": place.key}))


def _llm_variables(place: Place) -> Mapping[str, str]:
    return {"LLM_USER_PATH": str(place.home / "llm")}


def _llm(place: Place, prompt: str) -> list[str]:
    return [place.venv("python", "llm"), "prompt", "-m", place.model, "--no-log", "-T", "llm_time", prompt]


def _litellm(place: Place, prompt: str) -> list[str]:
    script = Path(__file__).with_name("litellm_task.py")
    return [place.venv("python", "python"), str(script), f"{place.root}/v1", place.key, place.model, prompt]


AGENTS = (
    Agent("claude-code", "@anthropic-ai/claude-code", _claude, "claude-code", "Read"),
    Agent("codex", "@openai/codex", _codex, "codex", "mcp__notes__read_notes"),
    Agent(
        "opencode",
        "opencode-ai",
        lambda place, prompt: [place.npm("opencode"), "run", prompt],
        "opencode",
        "read",
        variables=_opencode_variables,
    ),
    Agent("continue", "@continuedev/cli", _continue, "continue", "List", variables=_continue_variables),
    Agent("continue-fim", "@continuedev/openai-adapters", _continue_fim),
    Agent("cline", "cline", _cline, "cline", "read_files"),
    Agent("aider", "aider-chat", _aider, "aider"),
    Agent("llm", "llm", _llm, tool="llm_time", prepare=_prepare_llm, variables=_llm_variables),
    Agent(
        "litellm",
        "litellm",
        _litellm,
        tool="count_words",
        variables=lambda place: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
)
