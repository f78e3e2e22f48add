"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF header.

Two kinds: "gpt2" is byte-level BPE whose pre-tokenizer goes by a name; "llama" is SentencePiece BPE with
byte fallback. Source: llama.cpp's llama-vocab (names, regular expressions, defaults) and the
tokenizer.json files the models were published with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf_header import GgufHeader
from quantd.quant.tokenizers_failures import failures_told

SPACE_MARK = "▁"


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
THREE_DIGITS = r"[0-9][0-9][0-9]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}|{TAIL}"
GPT4O = rf"{LEAD}{UPPER}*{LOWER}+{CONTRACTION}?|{LEAD}{UPPER}+{LOWER}*{CONTRACTION}?|\p{{N}}{{1,3}}|{TAIL}"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: each of `splits` in turn, every match and every rest its own piece."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


CODE = PreTokenizer((DIGIT, GPT2))
PLAIN = PreTokenizer((GPT2,))

# tokenizer.ggml.pre -> the rule; names that share a rule share a row.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule
    for names, rule in (
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", CODE),
        ("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 roberta-bpe gigachat", PLAIN),
        ("llama-bpe llama3 llama-v3 falcon3 pixtral lfm2", PreTokenizer((LLAMA3,), True, True)),
        ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((LLAMA3,))),
        ("qwen2", PreTokenizer((QWEN2,), nfc=True)),
        ("stablelm2 deepseek-r1-qwen hunyuan megrez", PreTokenizer((QWEN2,))),
        ("tekken", PreTokenizer((TEKKEN,), True, True)),
        ("gpt-4o llama4", PreTokenizer((GPT4O,))),
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS))),
        ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS))),
    )
    for name in names.split()
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer half of a GGUF header, checked: token i is `tokens[i]` of type `types[i]`."""

    tokens: list[str]
    types: list[int]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool

    @property
    def ids(self) -> dict[str, int]:
        """Token to id; of a token listed twice the first id counts, as in llama.cpp."""
        ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            ids.setdefault(token, index)
        return ids

    def special_text(self, name: str) -> str | None:
        """The text of special token `name` (bos, eos, unk, pad), None where the file names none."""
        index = self.special.get(name)
        return None if index is None else self.tokens[index]


SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """The checked vocabulary of `header`; CheckpointError where its arrays or ids contradict each other."""
    tokens = header.items("tokenizer.ggml.tokens", str)
    types = header.items("tokenizer.ggml.token_type", int) or [TokenType.NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"{header.path}: {len(tokens)} tokens but {len(types)} token types")
    special = {}
    for name, key in SPECIAL_KEYS.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in header.metadata:
            special[name] = header.integer(key)
            if special[name] >= len(tokens):
                raise CheckpointError(
                    f"{header.path}: {key} {special[name]} is past the {len(tokens)} tokens"
                )
    sentencepiece = header.text("tokenizer.ggml.model") == "llama"
    add_bos = header.flag("tokenizer.ggml.add_bos_token", sentencepiece or _pre_tokenizer(header).add_bos)
    add_eos = header.flag("tokenizer.ggml.add_eos_token", False)
    return Vocabulary(tokens, types, special, add_bos, add_eos)


def build_tokenizer(header: GgufHeader, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that `header` describes.

    Raises UnsupportedModelError naming an unknown kind or pre-tokenizer, CheckpointError for merges that
    do not fit the vocabulary.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind not in BUILDERS:
        raise UnsupportedModelError(f"{header.path}: tokenizer.ggml.model {kind!r} is not supported")
    with failures_told(lambda reason: CheckpointError(f"{header.path}: makes no tokenizer: {reason}")):
        tokenizer = BUILDERS[kind](header, vocabulary)
        _add_special_tokens(tokenizer, vocabulary)
        _add_bos_and_eos(header, tokenizer, vocabulary)
        return tokenizer


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in header.metadata else "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path}: pre-tokenizer {name!r} is not known, so its text cannot be cut"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(header: GgufHeader, vocabulary: Vocabulary) -> Tokenizer:
    rule = _pre_tokenizer(header)
    ids = vocabulary.ids
    merges = _stored_merges(header, ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GgufHeader, vocabulary: Vocabulary) -> Tokenizer:
    ids = vocabulary.ids
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_stored_merges(header, ids) or _implied_merges(header, vocabulary, ids),
            unk_token=vocabulary.special_text("unk"),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    mark = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if prefix else mark
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _stored_merges(header: GgufHeader, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs split at the first space after the first character: a token may itself begin with one."""
    merges = []
    for merge in header.items("tokenizer.ggml.merges", str):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{header.path}: the merge {merge!r} does not fit the vocabulary")
        merges.append((left, right))
    return merges


def _implied_merges(header: GgufHeader, vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: a split of a token merges at its score.

    Gemma's published scores do not follow its merge order; the order of its tokens does.
    """
    scores = header.items("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{header.path}: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    by_position = header.architecture.startswith("gemma")
    ranked = []
    for token, index in ids.items():
        if vocabulary.types[index] != TokenType.NORMAL:
            continue
        rank = index if by_position else -scores[index]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((rank, -len(left), ids[left], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are special (dropped from text); user-defined ones are only matched whole."""
    added = [
        AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token and kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_bos_and_eos(header: GgufHeader, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    bos = vocabulary.special_text("bos") if vocabulary.add_bos else None
    eos = vocabulary.special_text("eos") if vocabulary.add_eos else None
    used = [(text, vocabulary.special[name]) for name, text in (("bos", bos), ("eos", eos)) if text]
    if not used:
        return
    for text, _ in used:
        # In the library's templates `$` begins a sequence and `:` a type.
        if ":" in text or text.startswith("$"):
            raise UnsupportedModelError(f"{header.path}: the token {text!r} cannot stand around a text")
    single = [*([bos] if bos else []), "$A:0", *([eos] if eos else [])]
    pair = [
        *single,
        *(piece.replace("$A:0", "$B:1") if piece == "$A:0" else f"{piece}:1" for piece in single),
    ]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
