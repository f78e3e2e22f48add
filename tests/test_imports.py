"""Packages import downward only, the daemon's side is torch-free, and one file reads the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("kernels", "quant", "engine", "daemon")
HEAVY = {"torch", "transformers", "triton", "accelerate"}
TORCH_FREE = {
    "kernels": {"__init__", "errors", "machine"},
    "quant": {
        "__init__",
        "config",
        "config_compressed_tensors",
        "config_fields",
        "config_gptq",
        "errors",
        "gguf_blocks",
        "gguf_config",
        "gguf_families",
        "gguf_header",
        "gguf_import",
        "gguf_index",
        "gguf_tokenizer",
        "safetensors_file",
    },
    "engine": {
        "__init__",
        "block_file",
        "block_folder",
        "block_pool",
        "cache_manager",
        "client",
        "config",
        "disk_cache",
        "disk_reader",
        "disk_space",
        "disk_thread",
        "disk_writer",
        "errors",
        "grammar",
        "memory_plan",
        "messages",
        "plan",
        "pool_blocks",
        "prefix_cache",
        "rank_messages",
        "ranks",
        "request",
        "scheduler",
        "stepping",
        "split",
        "token_masks",
        "weights_digest",
    },
}
SOURCES = {
    path: ast.parse(path.read_text()) for name in ORDER for path in sorted((ROOT / name).rglob("*.py"))
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("quantd", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_name(path): tree for path, tree in SOURCES.items()}


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The modules (and the names in them, which may be modules too) that some statements import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def walk(tree: ast.AST, skip: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """All nodes but those for the type checker only and those below the kinds to skip."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, skip) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        yield node
        yield from walk(node, skip)


def at_import(tree: ast.AST) -> set[str]:
    return imported(walk(tree, (ast.FunctionDef, ast.AsyncFunctionDef)))


def is_torch_free(path: Path) -> bool:
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    return package == "daemon" or (len(rest) == 1 and rest[0] in TORCH_FREE[package])


def torch_free_modules() -> list[str]:
    return [module_name(path) for path in SOURCES if is_torch_free(path)]


def test_packages_import_downward_only() -> None:
    for path, tree in SOURCES.items():
        own = ORDER.index(path.relative_to(ROOT).parts[0])
        for name in imported(ast.walk(tree)):
            if name.startswith("quantd."):
                assert ORDER.index(name.split(".")[1]) <= own, f"{path.relative_to(ROOT)} imports {name}"


def test_torch_free_modules_never_name_torch() -> None:
    for name in torch_free_modules():
        heavy = {module for module in imported(walk(MODULES[name])) if module.split(".")[0] in HEAVY}
        assert not heavy, f"{name} imports {heavy}"


def test_torch_free_modules_import_only_their_like() -> None:
    """What torch-free code imports, at whatever distance, is free of torch too; the chain is named."""
    for start in torch_free_modules():
        chains = {start: start}
        waiting = [start]
        while waiting:
            name = waiting.pop()
            for target in at_import(MODULES[name]):
                assert target.split(".")[0] not in HEAVY, f"{chains[name]} -> {target}"
                if target in MODULES and target not in chains:
                    chains[target] = f"{chains[name]} -> {target}"
                    waiting.append(target)


def test_torch_free_at_run_time() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    assert not {HEAVY!r} & sys.modules.keys(), name\n"
    )
    names = [name for name in torch_free_modules() if not name.endswith("__main__")]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def environment_reads(tree: ast.AST) -> list[str]:
    """What reads variables: not a store into one, nor handing all on (`os.environ | {}`)."""
    names = {"environ", "getenv", "environb"}
    assert not {f"os.{name}" for name in names} & imported(ast.walk(tree)), "write os.environ"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    return [ast.unparse(parents[parents[node]]) for node in found if not _only_passes_on(parents[node])]


def _only_passes_on(use: ast.AST) -> bool:
    stores = isinstance(use, ast.Subscript) and isinstance(use.ctx, ast.Store)
    defaults = isinstance(use, ast.Attribute) and use.attr == "setdefault"
    return stores or defaults or isinstance(use, ast.BinOp)


@pytest.mark.parametrize("path", [path for path in SOURCES if path != ROOT / "daemon" / "config.py"], ids=str)
def test_only_the_configuration_reads_the_environment(path: Path) -> None:
    reads = environment_reads(SOURCES[path])
    if path.is_relative_to(ROOT / "kernels" / "cpu"):
        reads = [read for read in reads if "'CC'" not in read and "'XDG_CACHE_HOME'" not in read]
    if path == ROOT / "engine" / "log_lines.py":  # what each process is told by systemd
        reads = [read for read in reads if "'JOURNAL_STREAM'" not in read]
    if path == ROOT / "kernels" / "gpu" / "report.py":  # tells what CUDA reads
        reads = [read for read in reads if "'CUDA_VISIBLE_DEVICES'" not in read]
    assert not reads
