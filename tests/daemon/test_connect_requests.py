"""The requests that `quantd connect` has its users try are answered by the daemon they are meant for."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest
from daemon_in_loop import in_loop, running_daemon
from fake_models import QWEN_INFILL

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.connect.endpoint import Endpoint
from quantd.daemon.connect.probes import Probe
from quantd.daemon.connect.tools import TOOLS

PROBES = {probe.path + "+" * probe.infills: probe for tool in TOOLS.values() for probe in tool.probes}


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
@in_loop
async def test_the_line_for_the_shell_works(probe: Probe) -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        line = probe.line(Endpoint("127.0.0.1", daemon.port, "tiny", 64))
        curl, url, header_option, header, data_option, body = shlex.split(line)
        assert (curl, header_option, data_option) == ("curl", "-H", "-d")
        name, value = header.split(": ")
        async with daemon.session.post(url, data=body.encode(), headers={name: value}) as response:
            assert response.status == 200, await response.text()
            assert json.loads(await response.read())
        assert daemon.engine.seen[-1].sampling.max_tokens == 32


@in_loop
async def test_a_daemon_that_wants_a_key_is_noticed(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("editor", "infer")
    async with running_daemon(access=Access(keys)) as daemon:
        address = ("127.0.0.1", daemon.port)
        for given, wants in ((None, True), ("sk-other", True), (key, False)):
            assert await asyncio.to_thread(DaemonClient(address, given).wants_key) == wants
