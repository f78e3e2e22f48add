"""What the command line asks of a daemon."""

from __future__ import annotations

import json

from daemon_in_loop import in_loop, running_daemon

from quantd.quant.errors import CheckpointError

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@in_loop
async def test_load_tells_progress_and_the_models_info() -> None:
    async with running_daemon() as daemon:
        assert await daemon.get("/health") == (200, {"status": "ok"})
        body = {"model": "tiny", "options": {"kv_dtype": "fp32"}}
        async with daemon.session.post("http://x/quantd/load", json=body) as response:
            assert response.headers["Content-Type"] == "application/x-ndjson"
            *steps, last = [json.loads(line) for line in (await response.read()).splitlines()]
        assert all(step["status"] == "loading" for step in steps)
        assert last["status"] == "ready" and last["info"]["num_blocks"] == 64
        assert daemon.engines.configs[0].kv_dtype == "fp32"
        _, status = await daemon.get("/quantd/status")
        (model,) = status["models"]
        assert (model["name"], model["state"]) == ("tiny", "ready")
        assert model["stats"]["blocks_free"] == 64 and model["info"] == last["info"]
        assert model["unloads_in"] is None
        await daemon.service.load("tiny", 600)
        _, status = await daemon.get("/quantd/status")
        assert 590 < status["models"][0]["unloads_in"] <= 600
        assert status["listening"] == ["unix"] and status["pid"] and status["uptime_seconds"] >= 0
        assert (await daemon.post("/quantd/unload", {"model": "tiny"}))[0] == 200
        assert (await daemon.get("/quantd/status"))[1]["models"] == []


@in_loop
async def test_options_are_not_passed_over_when_the_model_is_loaded_already() -> None:
    async with running_daemon() as daemon:
        for options in ({"kv_dtype": "fp32"}, {"kv_dtype": "fp32"}, {}, {"threads": 0}):
            body = {"model": "tiny", "options": options}
            async with daemon.session.post("http://x/quantd/load", json=body) as response:
                assert response.status == 200 and b"ready" in await response.read()
        status, answer = await daemon.post(
            "/quantd/load", {"model": "tiny", "options": {"kv_dtype": "int8", "threads": 0}}
        )
        assert status == 400 and "kv_dtype fp32" in answer["error"]["message"]
        assert len(daemon.engines.started) == 1


@in_loop
async def test_load_failures() -> None:
    async with running_daemon() as daemon:
        assert (await daemon.post("/quantd/load", {"model": "nosuch"}))[0] == 404
        assert (await daemon.post("/quantd/load", {}))[0] == 400
        assert (await daemon.post("/quantd/unload", {"model": "tiny"}))[0] == 404
        daemon.engines.failures.append(CheckpointError("a shard is missing"))
        async with daemon.session.post("http://x/quantd/load", json={"model": "tiny"}) as response:
            *_, last = (await response.read()).splitlines()
        assert json.loads(last)["error"]["message"] == "a shard is missing"
