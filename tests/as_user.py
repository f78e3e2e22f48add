"""Requests of another user of this machine: a child process that has dropped its rights."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

CAN_SWITCH = os.geteuid() == 0
"""Whether this process may start others as other users."""

USERS = (12345, 12346)
"""Users that own nothing, and need not be known to the machine."""

_CLIENT = """
import encodings.idna, http.client, json, os, socket, sys
uid, address, exchanges = json.load(sys.stdin)
if uid != os.geteuid():
    os.setgroups([os.getegid()])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
answers = []
for method, path, body in exchanges:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    if isinstance(address, str):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        connection.sock.connect(address)
    else:
        connection.sock = socket.create_connection(("127.0.0.1", address), 60)
    connection.request(method, path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    text = response.read().decode()
    answers.append([response.status, json.loads(text) if text[:1] in "{[" else text])
    connection.close()
json.dump(answers, sys.stdout)
"""

Exchange = tuple[str, str, object]


async def ask_as(uid: int, address: Path | int, *exchanges: Exchange) -> list[tuple[int, Any]]:
    """Status and body of each answer. address: a Unix socket, for the group of this process, or a port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _CLIENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    target = str(address) if isinstance(address, Path) else address
    sent = json.dumps([uid, target, exchanges]).encode()
    output, _ = await process.communicate(sent)
    assert process.returncode == 0
    return [(status, body) for status, body in json.loads(output)]
