"""The programs that `quantd connect` knows, by name."""

from __future__ import annotations

from collections.abc import Mapping

from quantd.daemon.connect.tool import Tool
from quantd.daemon.connect.tools.agents import AGENTS
from quantd.daemon.connect.tools.editors import EDITORS
from quantd.daemon.connect.tools.emacs import EMACS_TOOLS
from quantd.daemon.connect.tools.servers import SERVERS
from quantd.daemon.connect.tools.vim import VIM_TOOLS
from quantd.daemon.connect.tools.vscode import VSCODE_TOOLS

TOOLS: Mapping[str, Tool] = {
    tool.name: tool for tool in (*EDITORS, *VSCODE_TOOLS, *VIM_TOOLS, *EMACS_TOOLS, *AGENTS, *SERVERS)
}
