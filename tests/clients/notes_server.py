"""An MCP server with one harmless tool, over standard input and output (modelcontextprotocol.io)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

TOOL = {
    "name": "read_notes",
    "description": "Read the user's notes.",
    "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
    "annotations": {"readOnlyHint": True},
}


def result_of(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    if method == "initialize":
        about = {"name": "notes", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "The heron stands in the shallow water."}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            result = result_of(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
