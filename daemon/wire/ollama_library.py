"""Ollama's bodies and lines for models that are fetched, made, copied and deleted (docs/api.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from quantd.daemon.blobs import Blobs
from quantd.daemon.errors import StoreError
from quantd.daemon.library_worker import Build, Derive, Job, Pull, Step
from quantd.daemon.preset import Preset
from quantd.daemon.sources.files import is_model_file
from quantd.daemon.store import check_name, plain_name
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.wire.body import SAMPLING_FIELDS, parse, refuse_unsupported
from quantd.daemon.wire.ollama_messages import MessageBody, neutral_messages
from quantd.daemon.wire.ollama_request import OptionsBody
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

_UNSUPPORTED = (
    "adapters",
    "draft_files",
    "modelfile",
    "parser",
    "path",
    "quantization",
    "quantize",
    "remote_host",
    "renderer",
)


class NameBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model, by either of two names for its name."""

    model: str = ""
    name: str = ""

    @property
    def chosen(self) -> str:
        """The name. Raises RequestError where there is none."""
        return required(self.model or self.name)


def required(model: str, field: str = "model") -> str:
    """The name of a model. Raises RequestError for an empty one."""
    if not model:
        raise RequestError(f"{field} is required", field)
    return model


class ShowBody(NameBody, frozen=True, kw_only=True):
    """POST /api/show. verbose: with its tensors."""

    verbose: bool | None = None


class PullBody(NameBody, frozen=True, kw_only=True):
    """POST /api/pull"""

    stream: bool | None = None

    def job(self, root: str) -> Job:
        """The job for a store in this folder. Raises RequestError."""
        return Job(root, Pull(self.chosen.removesuffix(":latest")))


class CopyBody(msgspec.Struct, frozen=True):
    """POST /api/copy"""

    source: str = ""
    destination: str = ""

    def job(self, root: str) -> Job:
        """The job for a store in this folder. Raises RequestError."""
        name = new_name(required(self.destination, "destination"), "destination")
        return Job(root, Derive(required(self.source, "source")), name, replace=True)


class CreateBody(NameBody, frozen=True, kw_only=True):
    """POST /api/create"""

    base: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[MessageBody] | None = None
    stream: bool | None = None
    adapters: Any = None
    draft_files: Any = None
    modelfile: Any = None
    parser: Any = None
    path: Any = None
    quantization: Any = None
    quantize: Any = None
    remote_host: Any = None
    renderer: Any = None

    def job(self, root: str, blobs: Blobs) -> Job:
        """The job for a store in this folder. Raises RequestError."""
        refuse_unsupported(self, tuple(name for name in _UNSUPPORTED if getattr(self, name)))
        what = Build(self._files(blobs)) if self.files else Derive(required(self.base or "", "from"))
        name, template = new_name(self.chosen, "model"), self._template()
        return Job(root, what, name, self._preset(), template, replace=True)

    def _template(self) -> str | None:
        if not self.template:
            return None
        try:
            return ChatTemplate(self.template, {}).source
        except CheckpointError as error:
            raise RequestError(f"template: {error}; it must be Jinja, not Go", "template") from None

    def _files(self, blobs: Blobs) -> dict[str, str]:
        paths = {name: blobs.path(digest) for name, digest in (self.files or {}).items()}
        for name, path in paths.items():
            if "/" in name or not is_model_file(name):
                raise RequestError(f"files: {name!r} is not a file of a model that quantd can load", "files")
            if not path.is_file():
                raise RequestError(f"files: {name} is not here; send it to /api/blobs first", "files")
        return {name: str(path) for name, path in paths.items()}

    def _preset(self) -> Preset:
        options = parse(msgspec.json.encode(self.parameters or {}), OptionsBody).neutral(None, None, None)
        given = msgspec.structs.asdict(options.sampling)
        named = [name for name in SAMPLING_FIELDS if name not in options.open]
        license = self.license or ""
        return Preset(
            system=self.system or "",
            messages=neutral_messages(self.messages or []),
            sampling={name: given[name] for name in named},
            stop=list(options.stop),
            context_len=options.context_len,
            max_tokens=options.sampling.max_tokens,
            license=license if isinstance(license, str) else "\n".join(license),
        )


def new_name(name: str, field: str) -> str:
    """A name for a model. Raises RequestError for one that cannot be."""
    try:
        return check_name(plain_name(name))
    except StoreError as error:
        raise RequestError(f"{field}: {error}", field) from None


def progress_line(job: Job, step: Step) -> Mapping[str, Any]:
    """A step of a job. Clients draw a bar for each digest, which here names what is transferred."""
    if step.stage != "downloading":
        return {"status": "verifying sha256 digest" if step.stage == "verifying" else step.stage}
    digest = hashlib.sha256(msgspec.json.encode(job.what)).hexdigest()
    total = {} if step.total is None else {"total": step.total}
    completed = step.done if step.total is None else min(step.done, step.total)
    return {
        "status": f"pulling {digest[:12]}",
        "digest": f"sha256:{digest}",
        **total,
        "completed": completed,
    }
