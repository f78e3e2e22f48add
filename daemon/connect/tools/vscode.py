"""Extensions of VS Code."""

from __future__ import annotations

from collections.abc import Sequence

from quantd.daemon.connect.document import Item
from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, INFILL, OLLAMA_INSERT
from quantd.daemon.connect.tool import Tool

_TOKENS_PER_CHUNK = 2048
_MOST_CHUNKS = 16


def ring_chunks(endpoint: Endpoint) -> int:
    """How many chunks of 64 lines llama.vim and llama.vscode may send along, so that they fit the context."""
    return min(_MOST_CHUNKS, endpoint.context // _TOKENS_PER_CHUNK)


def _continue_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """docs.continue.dev/reference. Its provider "ollama" is the one that has the daemon lay out infill."""
    folder = folders.named_by("CONTINUE_GLOBAL_DIR", ".continue")
    chat = {
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.v1,
        "apiKey": endpoint.any_key,
        "roles": ["chat", "edit", "apply"],
        **({"capabilities": ["tool_use"]} if endpoint.takes_tools else {}),
        "defaultCompletionOptions": {"contextLength": endpoint.context, "maxTokens": endpoint.max_output},
    }
    completion = {
        "provider": "ollama",
        "model": endpoint.model,
        "apiBase": endpoint.root,
        "apiKey": endpoint.any_key,
        "roles": ["autocomplete"],
        "defaultCompletionOptions": {"contextLength": endpoint.context},
    }
    name = f"quantd {endpoint.model}"
    puts = [
        Put(("name",), "Local Config", "frame"),
        Put(("version",), "1.0.0", "frame"),
        Put(("schema",), "v1", "frame"),
        Put(("models", Item("name", name)), chat),
    ]
    if endpoint.infills:
        puts.append(Put(("models", Item("name", f"{name} completion")), completion))
    return [ConfigFile(folder / "config.yaml", "yaml", puts, instead_of=folder / "config.json")]


def _llama_vscode_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """package.json of ggml-org/llama.vscode; it appends its API version, v1, itself."""
    values = {
        "endpoint": endpoint.root,
        "endpoint_chat": endpoint.root,
        "endpoint_tools": endpoint.root,
        "ai_model": endpoint.model,
        "ring_n_chunks": ring_chunks(endpoint),
    }
    if endpoint.key is not None:
        values |= dict.fromkeys(("api_key", "api_key_chat", "api_key_tools"), endpoint.key)
    puts = [Put((f"llama-vscode.{key}",), value) for key, value in values.items()]
    return [ConfigFile(folders.vscode / "settings.json", "json", puts)]


def _copilot_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """code.visualstudio.com/docs, AI language models: the provider "Custom Endpoint"."""
    model = {
        "id": endpoint.model,
        "name": f"{endpoint.model} (quantd)",
        "url": f"{endpoint.v1}/chat/completions",
        "toolCalling": endpoint.takes_tools,
        "vision": False,
        "maxInputTokens": endpoint.context - endpoint.max_output,
        "maxOutputTokens": endpoint.max_output,
    }
    entry = {"vendor": "customendpoint", "apiType": "chat-completions", "models": [model]}
    if endpoint.key is not None:
        entry["apiKey"] = endpoint.key
    puts = [Put((Item("name", "quantd"),), entry)]
    return [ConfigFile(folders.vscode / "chatLanguageModels.json", "json", puts)]


def _copilot_steps(endpoint: Endpoint) -> Sequence[str]:
    return (
        f"Choose {endpoint.model} (quantd) in the chat's model picker; restart VS Code if it is not there.",
        f"By hand instead: Manage Language Models > Add Models > Ollama, URL {endpoint.root}. VS Code then "
        "goes by the context that the model was trained for, not by the one that is served.",
    )


VSCODE_TOOLS = (
    Tool(
        name="continue",
        title="Continue: chat, edit, agent, completion; also its command line",
        reads="~/.continue/config.yaml",
        probes=(CHAT, OLLAMA_INSERT),
        files=_continue_files,
        steps=lambda endpoint: (f"Choose quantd {endpoint.model} below the chat.",),
    ),
    Tool(
        name="llama.vscode",
        title="llama.vscode: completion, chat, agent",
        reads="settings.json of VS Code",
        probes=(INFILL, CHAT),
        files=_llama_vscode_files,
        steps=lambda endpoint: (
            "Deselect any environment in llama-vscode's menu; it would go before settings.",
        ),
    ),
    Tool(
        name="copilot",
        title="VS Code's chat (GitHub Copilot) with a model of your own",
        reads="chatLanguageModels.json of VS Code",
        probes=(CHAT,),
        files=_copilot_files,
        steps=_copilot_steps,
    ),
)
