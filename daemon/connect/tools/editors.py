"""Editors that talk to models themselves: Zed and the JetBrains IDEs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, OLLAMA_CHAT, SUFFIX
from quantd.daemon.connect.tool import Tool
from quantd.daemon.store import full_name

_EDIT_TOKENS = 64

# Zed's names for the layouts of quantd's families.
PROMPT_FORMATS = {
    "Qwen coder": "qwen",
    "Granite 4": "qwen",
    "CodeGemma": "code_gemma",
    "StarCoder2": "star_coder",
    "StarCoder, Granite and StableCode": "star_coder",
    "Code Llama": "code_llama",
    "DeepSeek Coder": "deepseek_coder",
    "Codestral": "codestral",
    "GLM": "glm",
}


def _zed_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """zed.dev/docs/ai: use-a-local-model, edit-prediction.

    Zed asks for num_ctx 4096 unless told more, and knows models by the names that /api/tags lists.
    """
    ollama = {"api_url": endpoint.root, "context_window": endpoint.context}
    model = {"provider": "ollama", "model": full_name(endpoint.model)}
    puts = [
        Put(("language_models", "ollama"), ollama),
        Put(("agent", "default_model"), model, "choice", f"choose {endpoint.model} in the agent panel"),
    ]
    if endpoint.infills:
        puts += _zed_edit_predictions(endpoint)
    return [ConfigFile(folders.config / "zed" / "settings.json", "json", puts)]


def _zed_edit_predictions(endpoint: Endpoint) -> list[Put]:
    """Zed writes the model's infill tokens itself; "infer" takes the format from the model's name."""
    family = endpoint.capabilities.infill if endpoint.capabilities else None
    api = {
        "api_url": f"{endpoint.v1}/completions",
        "model": endpoint.model,
        "prompt_format": PROMPT_FORMATS.get(family or "", "infer"),
        "max_output_tokens": _EDIT_TOKENS,
    }
    provider = "open_ai_compatible_api"
    return [
        Put(("edit_predictions", provider), api),
        Put(
            ("edit_predictions", "provider"),
            provider,
            "choice",
            f'set it to "{provider}" for completion by quantd',
        ),
    ]


def _zed_variables(endpoint: Endpoint) -> Mapping[str, str]:
    """Zed keeps keys in the keychain, where its settings put them, and else takes these."""
    if endpoint.key is None:
        return {}
    names = [
        "OLLAMA_API_KEY",
        *(["ZED_OPEN_AI_COMPATIBLE_EDIT_PREDICTION_API_KEY"] if endpoint.infills else []),
    ]
    return dict.fromkeys(names, endpoint.key)


def _jetbrains_steps(endpoint: Endpoint) -> Sequence[str]:
    """jetbrains.com/help/ai-assistant/use-custom-models.html"""
    return (
        "Open Settings > Tools > AI Assistant > Providers & API keys.",
        "Under Third-party AI providers choose OpenAI-compatible.",
        f"URL: {endpoint.v1}",
        f"API key: {endpoint.any_key}",
        f"Tool calling: {'on' if endpoint.takes_tools else 'off'}. Press Test Connection, then Apply.",
        f"Choose {endpoint.model} in the chat, and under Models Assignment for the features to use it.",
    )


EDITORS = (
    Tool(
        name="zed",
        title="Zed: agent, inline assistant, edit prediction",
        reads="~/.config/zed/settings.json",
        probes=(OLLAMA_CHAT, SUFFIX),
        files=_zed_files,
        variables=_zed_variables,
        steps=lambda endpoint: ("Zed takes it up when the file is saved; no restart.",),
    ),
    Tool(
        name="jetbrains",
        title="JetBrains IDEs: AI Assistant",
        reads="its settings dialog",
        probes=(CHAT,),
        steps=_jetbrains_steps,
    ),
)
