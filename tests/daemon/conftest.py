"""Fixtures of the daemon's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_models import write_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny")
