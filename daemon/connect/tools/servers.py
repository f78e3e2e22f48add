"""Programs that serve people themselves and have models behind them: Open WebUI, Tabby."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, SUFFIX
from quantd.daemon.connect.tool import Tool


def _open_webui_variables(endpoint: Endpoint) -> Mapping[str, str]:
    """docs.openwebui.com, environment variables"""
    return {"OPENAI_API_BASE_URL": endpoint.v1, "OPENAI_API_KEY": endpoint.any_key}


def _open_webui_steps(endpoint: Endpoint) -> Sequence[str]:
    return (
        "Start Open WebUI with these variables. One that has run before keeps what it knows: there, "
        f"Admin Panel > Settings > Connections > OpenAI API > +, URL {endpoint.v1}, key {endpoint.any_key}.",
        f"From a container the URL is http://host.docker.internal:{endpoint.port}/v1, and the daemon has to "
        "listen beyond loopback (quantd serve --host), for which it wants to have made a key.",
    )


def _tabby_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """tabby.tabbyml.com/docs/administration/model: "openai/completion" sends prompt and suffix apart."""
    api = {"model_name": endpoint.model, "api_endpoint": endpoint.v1, "api_key": endpoint.any_key}
    puts = [Put(("model", "chat", "http"), {"kind": "openai/chat", **api})]
    if endpoint.infills:
        puts.append(Put(("model", "completion", "http"), {"kind": "openai/completion", **api}))
    return [ConfigFile(folders.named_by("TABBY_ROOT", ".tabby") / "config.toml", "toml", puts)]


SERVERS = (
    Tool(
        name="open-webui",
        title="Open WebUI: chat in the browser",
        reads="variables of its environment",
        probes=(CHAT,),
        variables=_open_webui_variables,
        steps=_open_webui_steps,
    ),
    Tool(
        name="tabby",
        title="Tabby: completion and chat for a team",
        reads="~/.tabby/config.toml",
        probes=(SUFFIX, CHAT),
        files=_tabby_files,
        steps=lambda endpoint: ("Restart tabby serve, without --model and --chat-model.",),
    ),
)
