"""Plugins of Vim and Neovim.

A plugin of Neovim gets a file of ours in the form that lazy.nvim reads below lua/plugins; it adds options to
the plugin where that is installed. Who uses another plugin manager passes its `opts` to setup().
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from textwrap import indent

from quantd.daemon.connect.edit import ConfigFile
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.folders import UserFolders
from quantd.daemon.connect.merge import Put
from quantd.daemon.connect.probes import CHAT, INFILL, SUFFIX
from quantd.daemon.connect.text_documents import WHOLE
from quantd.daemon.connect.tool import Files, Tool
from quantd.daemon.connect.tools.vscode import ring_chunks

_CHARS_PER_TOKEN = 2
_MINUET_CHARS = 16000
_PATIENCE_MS = 600_000


def _llama_vim_files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
    """autoload/llama.vim. Both editors read files in plugin/; Vim's is taken where neither is set up."""
    vim, neovim = folders.home / ".vim", folders.config / "nvim"
    there = [folder for folder in (vim, neovim) if folder.exists()] or [vim]
    puts = [Put(WHOLE, _llama_vim(endpoint))]
    return [ConfigFile(folder / "plugin" / "quantd_llama.vim", "own", puts) for folder in there]


def _llama_vim(endpoint: Endpoint) -> str:
    """Settings that hold whether the plugin is loaded before or after them."""
    key = f"    \\ 'api_key':       '{endpoint.key}',\n" if endpoint.key else ""
    return f"""\
" Written by quantd connect llama.vim
let g:llama_config = extend(get(g:, 'llama_config', {{}}), {{
    \\ 'endpoint_fim':  '{endpoint.root}/infill',
    \\ 'endpoint_inst': '{endpoint.v1}/chat/completions',
    \\ 'model_fim':     '{endpoint.model}',
    \\ 'model_inst':    '{endpoint.model}',
    \\ 'ring_n_chunks': {ring_chunks(endpoint)},
{key}    \\ }})
"""


def _lua_files(module: str, repository: str, opts: Callable[[Endpoint], str]) -> Files:
    def files(endpoint: Endpoint, folders: UserFolders) -> Sequence[ConfigFile]:
        spec = f"""\
-- Written by quantd connect {module}
return {{
  "{repository}",
  optional = true,
  opts = {indent(opts(endpoint), "  ").lstrip()},
}}
"""
        path = folders.config / "nvim" / "lua" / "plugins" / f"quantd-{module}.lua"
        return [ConfigFile(path, "own", [Put(WHOLE, spec)])]

    return files


def _lua_steps(module: str) -> Callable[[Endpoint], Sequence[str]]:
    call = f'require("{module}").setup(require("plugins.quantd-{module}").opts)'
    return lambda endpoint: (
        f"lazy.nvim reads the file if it imports lua/plugins. Where you call setup yourself: {call}",
    )


def _minuet(endpoint: Endpoint) -> str:
    """README of milanglacier/minuet-ai.nvim: OpenAI-FIM-compatible. A key is a function or a variable."""
    return f"""\
{{
  provider = "openai_fim_compatible",
  n_completions = 1,
  context_window = {min(_MINUET_CHARS, endpoint.context * _CHARS_PER_TOKEN)},
  provider_options = {{
    openai_fim_compatible = {{
      name = "quantd",
      api_key = function() return {json.dumps(endpoint.any_key)} end,
      end_point = "{endpoint.v1}/completions",
      model = {json.dumps(endpoint.model)},
      optional = {{ max_tokens = 64, top_p = 0.9 }},
    }},
  }},
}}"""


def _codecompanion(endpoint: Endpoint) -> str:
    """doc/configuration/adapters-http.md of olimorris/codecompanion.nvim"""
    return f"""\
{{
  adapters = {{
    http = {{
      quantd = function()
        return require("codecompanion.adapters").extend("openai_compatible", {{
          env = {{
            url = "{endpoint.root}",
            api_key = function() return {json.dumps(endpoint.any_key)} end,
            chat_url = "/v1/chat/completions",
          }},
          schema = {{ model = {{ default = {json.dumps(endpoint.model)} }} }},
        }})
      end,
    }},
  }},
  interactions = {{
    chat = {{ adapter = "quantd" }},
    inline = {{ adapter = "quantd" }},
    cmd = {{ adapter = "quantd" }},
  }},
}}"""


def _avante(endpoint: Endpoint) -> str:
    """README of yetone/avante.nvim: providers. A key comes from a variable or a command, "" is for none."""
    key_command = "" if endpoint.key is None else f"cmd:echo {shlex.quote(endpoint.key)}"
    return f"""\
{{
  provider = "quantd",
  providers = {{
    quantd = {{
      __inherited_from = "openai",
      api_key_name = {json.dumps(key_command)},
      endpoint = "{endpoint.v1}",
      model = {json.dumps(endpoint.model)},
      context_window = {endpoint.context},
      timeout = {_PATIENCE_MS},
      extra_request_body = {{ max_tokens = {endpoint.max_output} }},
    }},
  }},
}}"""


VIM_TOOLS = (
    Tool(
        name="llama.vim",
        title="llama.vim: completion and edits in Vim and Neovim",
        reads="g:llama_config; a file of ours in ~/.vim/plugin or ~/.config/nvim/plugin",
        probes=(INFILL, CHAT),
        files=_llama_vim_files,
    ),
    Tool(
        name="minuet",
        title="minuet-ai.nvim: completion",
        reads="a file of ours, ~/.config/nvim/lua/plugins/quantd-minuet.lua",
        probes=(SUFFIX,),
        files=_lua_files("minuet", "milanglacier/minuet-ai.nvim", _minuet),
        steps=_lua_steps("minuet"),
    ),
    Tool(
        name="codecompanion",
        title="codecompanion.nvim: chat, inline edits",
        reads="a file of ours, ~/.config/nvim/lua/plugins/quantd-codecompanion.lua",
        probes=(CHAT,),
        files=_lua_files("codecompanion", "olimorris/codecompanion.nvim", _codecompanion),
        steps=_lua_steps("codecompanion"),
    ),
    Tool(
        name="avante",
        title="avante.nvim: chat, edits, agent",
        reads="a file of ours, ~/.config/nvim/lua/plugins/quantd-avante.lua",
        probes=(CHAT,),
        files=_lua_files("avante", "yetone/avante.nvim", _avante),
        steps=_lua_steps("avante"),
    ),
)
