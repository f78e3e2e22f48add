"""What hostile bytes reach, as functions of bytes: whatever they are, there is a result or a refusal of ours.

`refuses` is the rule: the exception family is a refusal, everything else a crash. A file of the corpus goes
to the target that its folder is named after.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from quantd.daemon.blobs import Blobs
from quantd.daemon.capabilities import Capabilities
from quantd.daemon.chat_format import AnswerRules, ChatFormat
from quantd.daemon.constraints import written_grammar
from quantd.daemon.json_schema import enforceable, loosened
from quantd.daemon.output_parser import Piece, joined
from quantd.daemon.prompts import call_rules
from quantd.daemon.reasoning import REASONING_TAGS, ReasoningTags
from quantd.daemon.requests import ChatRequest, CompletionRequest, InfillRequest
from quantd.daemon.response_store import ResponseStore
from quantd.daemon.scanner import ReadOutput, Scanner, Steps, read_content
from quantd.daemon.template_process import TemplateProcess
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tool_formats import families
from quantd.daemon.tool_formats.format import Calls, ToolFormat, read_tools
from quantd.daemon.tool_formats.lark import Lark
from quantd.daemon.tool_formats.schemas import types_of
from quantd.daemon.wire import (
    anthropic_request,
    llama_server_request,
    ollama_embeddings,
    ollama_library,
    ollama_request,
    openai_embeddings,
    openai_request,
    responses_request,
)
from quantd.daemon.wire.body import parse
from quantd.daemon.wire.responses_input import input_items
from quantd.engine.connection import Connection, read_frame
from quantd.engine.messages import Add, FromEngine, ModelInfo, ToEngine
from quantd.kernels.errors import QuantdError
from quantd.quant import gguf_header, gguf_import, gguf_tokenizer, safetensors_file

Target = Callable[[bytes], object]
CORPUS = Path(__file__).parent / "corpus"
CAN = Capabilities(chat=True, tools=True, thinking=True, infill="qwen")
FORMATS: list[ToolFormat] = [
    value for name, value in sorted(vars(families).items()) if name.isupper() and not name.startswith("_")
]
SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "g": {},
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INFO = ModelInfo(
    architecture="llama",
    backend="fake",
    vocab_size=514,
    hidden_size=4,
    max_model_len=512,
    weight_bytes=1,
    kv_dtype="int8",
    kv_bytes=1,
    kv_bytes_per_token=1,
    block_size=16,
    num_blocks=64,
    load_seconds=0.1,
)


def refuses(target: Target, data: bytes) -> bool:
    """Whether a target refuses these bytes. Raises what is a crash."""
    try:
        target(data)
    except QuantdError as error:
        assert str(error).encode(), "it can be told, as UTF-8"
        return True
    return False


@cache
def folder() -> Path:
    """A model folder that targets may write to; it goes with the process."""
    name = tempfile.mkdtemp(prefix="qd-fuzz-")
    atexit.register(shutil.rmtree, name)
    return Path(shutil.copytree(Path(__file__).parents[1] / "data" / "tokenizer", name, dirs_exist_ok=True))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(folder())


@cache
def chat() -> ChatFormat:
    return ChatFormat(ChatTemplate(TEMPLATE, {}), tokenizer())


@cache
def runner() -> TemplateProcess:
    process = TemplateProcess(seconds=1.0)
    atexit.register(process.close)
    return process


def written(data: bytes, name: str) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# Files of models.


def safetensors_header(data: bytes) -> object:
    return safetensors_file.read_header(written(data, "model.safetensors"))


def safetensors_index(data: bytes) -> object:
    """The index of shards, beside one shard that has a tensor `a`."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    written(len(header).to_bytes(8, "little") + header + b"x", "s.safetensors")
    written(data, "model.safetensors.index.json")
    return safetensors_file.read_index(folder())


def gguf_header_of(data: bytes) -> gguf_header.GgufHeader:
    return gguf_header.read_header(written(data, "model.gguf"))


def gguf_tokenizer_of(data: bytes) -> object:
    header = gguf_header_of(data)
    return gguf_tokenizer.build_tokenizer(header, gguf_tokenizer.read_vocabulary(header))


def gguf_model(data: bytes) -> object:
    """All that an import reads of a file."""
    path = written(data, "model.gguf")
    with tempfile.TemporaryDirectory(dir=folder()) as name:
        return gguf_import.import_gguf(path, Path(name))


def tokenizer_json(data: bytes) -> object:
    with tempfile.TemporaryDirectory(dir=folder()) as name:
        (Path(name) / "tokenizer.json").write_bytes(data)
        tokenizer = Tokenizer.load(Path(name))
        ids = tokenizer.encode_framed("Hello, <|im_end|> wörld!\n\n 123")
        detokenizer = tokenizer.detokenizer()
        return tokenizer.decode(ids), [detokenizer.feed(token_id) for token_id in ids], detokenizer.flush()


# Requests.


def _used(asked: object) -> object:
    """What the service does with a request before an engine gets it."""
    match asked:
        case ChatRequest():
            rules = AnswerRules(call_rules(asked), asked.options.constraint)
            prompt = chat().prompt(
                asked.messages,
                asked.tools,
                asked.documents,
                asked.template_variables,
                asked.thinking,
                asked.continues,
            )
            return chat().grammar(prompt, rules), chat().parser(prompt, rules)
        case CompletionRequest() | InfillRequest():
            constraint = asked.options.constraint
            return None if constraint is None else constraint.grammar()
    return asked


Reader = tuple[type[msgspec.Struct], Callable[[Any], object]]
BODIES: list[type[msgspec.Struct]] = []


def _requests(*readers: Reader) -> Target:
    """The first byte chooses among the bodies of a dialect."""
    BODIES.extend(body for body, _ in readers)

    def target(data: bytes) -> object:
        body, neutral = readers[data[0] % len(readers) if data else 0]
        return _used(neutral(parse(data[1:], body)))

    return target


def words() -> list[str]:
    """Names of fields and values, for which chance would take long."""
    _, parts = msgspec.json.schema_components(BODIES)
    return sorted(set(re.findall(r'"(\w+)"', json.dumps(parts))))


def _neutral(body: Any) -> object:
    return body.neutral()


def _ollama(body: Any) -> object:
    return body.stay if body.asks_nothing else (body.streams, _used(body.neutral(CAN)))


def _ollama_embeddings(body: Any) -> object:
    return body.stay, body.inputs and body.neutral()


def _response(body: Any) -> object:
    items = input_items(body.input or [], "key", ResponseStore())
    return frozenset(item["id"] for item in items), _used(body.neutral(items, 0))


openai = _requests(
    (openai_request.ChatBody, _neutral),
    (openai_request.CompletionBody, _neutral),
    (openai_request.FimBody, _neutral),
    (openai_embeddings.EmbeddingBody, _neutral),
)
anthropic = _requests(
    (anthropic_request.MessagesBody, _neutral),
    (anthropic_request.CountBody, _neutral),
)
responses = _requests(
    (responses_request.ResponsesBody, _response),
    (responses_request.CountBody, _response),
)
ollama = _requests(
    (ollama_request.ChatBody, _ollama),
    (ollama_request.GenerateBody, _ollama),
    (ollama_embeddings.EmbedBody, _ollama_embeddings),
    (ollama_embeddings.EmbeddingsBody, _ollama_embeddings),
    (ollama_library.CreateBody, lambda body: body.job("/nowhere", Blobs(Path("/nowhere")))),
    (ollama_library.CopyBody, lambda body: body.job("/nowhere")),
    (ollama_library.PullBody, lambda body: body.job("/nowhere")),
    (ollama_library.ShowBody, lambda body: body.chosen),
)
llama_server = _requests(
    (llama_server_request.CompletionBody, _neutral),
    (llama_server_request.InfillBody, _neutral),
    (llama_server_request.EmbeddingBody, _neutral),
    (llama_server_request.TokenizeBody, lambda body: body.tokens(tokenizer())),
    (llama_server_request.DetokenizeBody, lambda body: body.check(512)),
    (llama_server_request.SlotBody, lambda body: body.filename),
)


# Answers. How a text is cut, which the first bytes say, changes nothing of what is read.


def _cuts(data: bytes) -> Iterator[int]:
    yield from data[1:4]


def _same_at_every_cut(data: bytes, read: Callable[[Scanner], Steps[None]]) -> object:
    text = data[4:].decode(errors="replace")
    whole = _read(read, [text])
    for cut in _cuts(data):
        assert _read(read, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    assert _read(read, list(text)) == whole, text
    return whole


def _read(read: Callable[[Scanner], Steps[None]], parts: list[str]) -> list[Piece]:
    parser = ReadOutput(read, frozenset())
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined([*pieces, *parser.flush()])


def tool_calls(data: bytes) -> object:
    format = FORMATS[data[0] % len(FORMATS)] if data else FORMATS[0]
    return _same_at_every_cut(data, _reader(format, SCHEMAS))


def _reader(format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]]) -> Callable[[Scanner], Steps[None]]:
    def read(scanner: Scanner) -> Steps[None]:
        ids = itertools.count()
        return format.read(scanner, Calls(schemas, lambda: f"call{next(ids)}"))

    return read


def reasoning(data: bytes) -> object:
    choice = data[0] if data else 0
    tags: ReasoningTags = REASONING_TAGS[choice % len(REASONING_TAGS)]
    start = tags.start(("", tags.opening, tags.closing)[choice // 16 % 3])

    def read(scanner: Scanner) -> Steps[None]:
        yield from tags.read(scanner, start)
        yield from read_content(scanner)

    return _same_at_every_cut(data, read)


# Programs and rules.


def template(data: bytes) -> object:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>"}]
    source = data.decode(errors="replace")
    return ChatTemplate(source, {"bos_token": "<s>"}, runner()).render(messages, [{"type": "function"}])


def grammar(data: bytes) -> object:
    return written_grammar(data.decode(errors="replace"), "grammar").grammar()


def json_schema(data: bytes) -> object:
    schema = parse(data, dict[str, Any])
    loosened(schema)
    types_of(schema, schema)
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    for format in FORMATS:
        text = format.write([("f", {"a": 1, "b": "x"})])
        _read(_reader(format, {"f": tools[0].parameters}), [text])
        format.grammar(Lark(tokenizer()), tools, True)
    return json.dumps(enforceable(schema, "format"))


# Frames.


def frames(data: bytes) -> object:
    """Both ends of an engine's connection. That a frame ends, or is none, is what their callers expect."""
    found: list[object] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.send(data[: 1 << 16])
        ours.close()
        connection, decoder = Connection(theirs), msgspec.msgpack.Decoder[ToEngine](ToEngine)
        try:
            while True:
                message = connection.receive(decoder)
                found.append(message)
                if isinstance(message, Add):
                    INFO.check_request(message.request)
        except (EOFError, ConnectionError, msgspec.MsgspecError):
            connection.close()
    asyncio.run(_read_frames(data, found))
    return found


async def _read_frames(data: bytes, found: list[object]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        while True:
            found.append(msgspec.msgpack.decode(await read_frame(reader), type=FromEngine))
    except (EOFError, ConnectionError, msgspec.MsgspecError):
        return


TARGETS: dict[str, Target] = {
    "safetensors_header": safetensors_header,
    "safetensors_index": safetensors_index,
    "gguf_header": gguf_header_of,
    "gguf_tokenizer": gguf_tokenizer_of,
    "gguf_model": gguf_model,
    "tokenizer_json": tokenizer_json,
    "openai": openai,
    "anthropic": anthropic,
    "responses": responses,
    "ollama": ollama,
    "llama_server": llama_server,
    "tool_calls": tool_calls,
    "reasoning": reasoning,
    "template": template,
    "grammar": grammar,
    "json_schema": json_schema,
    "frames": frames,
}
