"""A process that this one starts and talks to over a stream socket (torch-free)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

END_SECONDS = 5.0
_STDERR = 2


@dataclass(frozen=True)
class Child:
    """The process, and our end of the socket. Its last argument is the descriptor of its own end."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, command: Sequence[str], output: int | IO[bytes] | None = None) -> Child:
        """Start one, in a session of its own. output: a file for what it prints, else our standard error."""
        output = _STDERR if output is None else output
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fd = theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(fd),
                    pass_fds=(fd,),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            await process.wait()
            raise
        return cls(process, reader, writer)

    async def end(self) -> int:
        """Hang up, which ends it, and wait for its end, after a while by force; its exit status."""
        self.writer.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                return await self.process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """End it whatever it is doing; its exit status."""
        self.writer.close()
        self.process.kill()
        return await self.process.wait()
