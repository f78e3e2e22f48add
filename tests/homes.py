"""Homes of quantd for tests: none is the user's, and all share what is costly to make again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from quantd.daemon.store import Store

# What is kept from one run to the next: the real model, compiled kernels.
TEST_HOME = Path(
    os.environ.get("QUANTD_TEST_HOME", Path(__file__).parents[1] / "build" / "test-home")
).absolute()


def share_kernels(home: Path) -> None:
    """Make the compiled kernels that are kept the ones of a home (a folder, made if need be)."""
    kept = TEST_HOME / "cache" / "quantd" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    cache = home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "kernels").exists():
        (cache / "kernels").symlink_to(kept)


def add_tiny(home: Path, *names: str, template: str | None = None, endless: bool = False) -> Path:
    """Put a model into a home under each of the names: random weights in GPTQ form, 8192 positions.

    template: its chat template; else that of its tokenizer. endless: no token ends its answers. Returns
    the home.
    """
    data, folder = Path(__file__).parent / "data", home / "source"
    shutil.copytree(data / "fixtures" / "gptqmodel-4b-g32-v2", folder)
    for file in (data / "tokenizer").iterdir():
        shutil.copy(file, folder)
    _change(folder / "config.json", max_position_embeddings=8192)
    if endless:
        _change(folder / "config.json", eos_token_id=None)
        _change(folder / "generation_config.json", eos_token_id=None)
        _change(folder / "tokenizer_config.json", eos_token=None)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name in names:
        Store(home / "models").import_path(folder, name)
    return home


def _change(file: Path, **fields: object) -> None:
    content = json.loads(file.read_text())
    file.chmod(0o644)
    file.write_text(json.dumps(content | fields))
