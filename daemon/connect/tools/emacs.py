"""Packages of Emacs. Each gets a marked block at the end of the init file, run when the package is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders, first_there
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, OLLAMA_CHAT
from quantd.daemon.connect.tool import Files, Tool


def _init_file(folders: UserFolders) -> Path:
    """Doom's own file, else the one that Emacs takes: manual, "The Emacs Initialization File"."""
    home, config = folders.home, folders.config
    doom = (config / "doom" / "config.el", home / ".doom.d" / "config.el")
    files = (
        *doom,
        home / ".emacs.el",
        home / ".emacs",
        home / ".emacs.d" / "init.el",
        config / "emacs" / "init.el",
    )
    there = next((file for file in files if file.exists()), None)
    return there or first_there(home / ".emacs.d", config / "emacs") / "init.el"


def _block_files(package: str, block: Callable[[Endpoint], str]) -> Files:
    def files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
        return [ConfigFile(_init_file(folders), "elisp", [Put((package,), block(endpoint))])]

    return files


def _gptel(endpoint: Endpoint) -> str:
    """README of karthink/gptel: gptel-make-openai"""
    model = json.dumps(endpoint.model)
    return f"""\
(with-eval-after-load 'gptel
  (setq gptel-model (intern {model})
        gptel-backend (gptel-make-openai "quantd"
                        :protocol "http"
                        :host "{endpoint.host_port}"
                        :key {json.dumps(endpoint.any_key)}
                        :stream t
                        :models (list (intern {model})))))
"""


def _ellama(endpoint: Endpoint) -> str:
    """README of s-kostyaev/ellama: ellama-provider. It also runs in Emacs 28, which has no setopt."""
    model = json.dumps(endpoint.model)
    maker, key = (
        ("make-llm-ollama-authed", f' :key "{endpoint.key}"') if endpoint.key else ("make-llm-ollama", "")
    )
    return f"""\
(with-eval-after-load 'ellama
  (require 'llm-ollama)
  (setq ellama-provider
        ({maker}{key}
         :scheme "http"
         :host "{endpoint.host}"
         :port {endpoint.port}
         :chat-model {model}
         :embedding-model {model})))
"""


EMACS_TOOLS = (
    Tool(
        name="gptel",
        title="gptel: chat in Emacs",
        reads="your init file; a marked block at its end",
        probes=(CHAT,),
        files=_block_files("gptel", _gptel),
        steps=lambda endpoint: ("Restart Emacs, or evaluate the block.",),
    ),
    Tool(
        name="ellama",
        title="ellama: chat and commands in Emacs",
        reads="your init file; a marked block at its end",
        probes=(OLLAMA_CHAT,),
        files=_block_files("ellama", _ellama),
        steps=lambda endpoint: ("Restart Emacs, or evaluate the block.",),
    ),
)
