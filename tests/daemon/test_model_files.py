"""What a model's files say of sampling, for clients that leave it open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemon_in_loop import in_loop, running_daemon

from quantd.daemon.model_files import model_sampling
from quantd.engine.request import Request
from quantd.quant.errors import CheckpointError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 2, "temperature": None}, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
    ],
)
def test_what_a_model_says(tmp_path: Path, config: object, expected: dict[str, float]) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert model_sampling(tmp_path) == expected


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}]
)
def test_bad_values_name_file_and_key(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"generation_config.*{next(iter(config))}"):
        model_sampling(tmp_path)


def sampling_of(request: Request) -> tuple[float, ...]:
    return request.sampling.temperature, request.sampling.top_p, request.sampling.min_p


@in_loop
async def test_the_usual_where_a_model_says_nothing() -> None:
    async with running_daemon() as daemon:
        await daemon.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
        await daemon.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, "top_p": 0.5})
        assert [sampling_of(request) for request in daemon.engine.seen] == [
            (0.8, 0.95, 0.05),
            (0.8, 0.5, 0.05),
        ]


@in_loop
async def test_a_client_overrides_the_models_own_values() -> None:
    async with running_daemon() as daemon:
        folder = daemon.store.get("tiny").path
        (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
        for given in ({}, {"temperature": None}, {"temperature": 1.0, "min_p": 0.1}):
            await daemon.post("/v1/completions", {"prompt": "hi", "max_tokens": 1} | given)
        used = [sampling_of(request) for request in daemon.engine.seen]
        assert used == [(0.6, 0.9, 0.0), (0.6, 0.9, 0.0), (1.0, 0.9, 0.1)]
