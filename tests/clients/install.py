"""The clients at fixed versions, from npm and PyPI, in folders of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

NPM = {
    "@anthropic-ai/claude-code": "2.1.332",
    "@openai/codex": "0.171.0",
    "opencode-ai": "1.18.33",
    "@continuedev/cli": "1.5.47",
    "@continuedev/openai-adapters": "1.37.0",
    "cline": "3.0.65",
}
# Aider wants old versions of what the others want new.
VENVS = {
    "aider": {"aider-chat": "0.86.2"},
    "python": {"llm": "0.36", "litellm": "1.110.2"},
}
VERSIONS = NPM | {name: version for venv in VENVS.values() for name, version in venv.items()}


def install(folder: Path) -> None:
    """Have all of them below `folder`, where they are not yet. Needs npm, and the registries."""
    if shutil.which("npm") is None:
        raise SystemExit("npm is missing: install Node.js, version 20 or later")
    _install_npm(folder / "npm")
    for name, packages in VENVS.items():
        _install_venv(folder / name, packages)


def _install_npm(folder: Path) -> None:
    wanted = json.dumps({"private": True, "dependencies": NPM}, indent=2)
    if not _begun(folder, wanted):
        return
    (folder / "package.json").write_text(wanted)
    print("installing", ", ".join(NPM), "...", file=sys.stderr)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
    (folder / ".installed").write_text(wanted)


def _install_venv(folder: Path, packages: dict[str, str]) -> None:
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    if not _begun(folder, "\n".join(wanted)):
        return
    print("installing", ", ".join(packages), "...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)
    (folder / ".installed").write_text("\n".join(wanted))


def _begun(folder: Path, wanted: str) -> bool:
    """An empty folder to install into; False where all that is wanted is there."""
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True
