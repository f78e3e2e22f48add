"""The requests that `quantd connect` has its users try are answered by the daemon they are meant for."""

from __future__ import annotations

import json
import shlex

import pytest
from daemon_in_loop import in_loop, running_daemon
from fake_models import QWEN_INFILL

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
