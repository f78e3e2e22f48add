"""Grammars in an engine: a random model says what they allow, and nobody beside it notices."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import Completion, InProcessEngine
from model_oracle import random_model
from test_models import TINY
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig
from waiting import PATIENCE

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RequestError
from quantd.engine.grammar import Compiled, GrammarCompiler, Matcher, ModelGrammars
from quantd.engine.plan import RequestState
from quantd.engine.request import MAX_GRAMMAR_LEN, MAX_LOGPROBS, Request, SamplingParams
from quantd.engine.runner import ModelRunner, build_runner
from quantd.engine.token_masks import TokenMasks

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
VOCAB_SIZE = 520  # some more than the tokenizer has
END = 2
YES_OR_NO = 'start: "yes" | "no"'
NUMBER = "start: /-?[1-9][0-9]{0,3}/"
WORDS = r"start: /[a-z]{1,6}( [a-z]{1,6}){2,9}/"
NESTED = 'start: "(" start ")" | "x"'
PAIR = "start: %json " + json.dumps(
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "size": {"enum": [1, 20, None]}},
        "required": ["on", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
PATTERNS = {
    YES_OR_NO: r"yes|no",
    NUMBER: r"-?[1-9][0-9]{0,3}",
    WORDS: r"[a-z]{1,6}( [a-z]{1,6}){2,9}",
    PAIR: r'\{"on":(true|false),"size":(1|20|null)\}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model(LlamaConfig(**TINY | {"vocab_size": VOCAB_SIZE}), seed=3).save_pretrained(folder)
    shutil.copy(DATA / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DATA / "tokenizer.json"))


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder), **({"kv_dtype": "fp32", "kv_memory": 8 << 20, "threads": 1} | options)
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return build_runner(config_of(folder), lambda done, total: None)


def asking(name: str, grammar: str | None, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Request:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 90, "stop_token_ids": (END,)} | sampling
    return Request(id=name, prompt=list(prompt), sampling=SamplingParams(grammar=grammar, **params))


def mixed(num_free: int = 3) -> list[Request]:
    """Every grammar greedily and by some seeds, beside requests without one."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 2, "top_k": 5},
        {"seed": 3, "top_p": 0.5, "min_p": 0.01},
        {"seed": 4, "repetition_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": {60: 100.0}},
    ]
    constrained = [
        asking(f"{i} {kind}", grammar, prompt=[9, 10 + i, *range(20, 20 + 3 * i)], logprobs=3, **kind)
        for i, grammar in enumerate(PATTERNS)
        for kind in kinds
    ]
    free = [
        asking(f"free {i}", None, prompt=range(40 + i, 70), seed=i, logprobs=MAX_LOGPROBS, max_tokens=70)
        for i in range(num_free)
    ]
    return [request for pair in zip(constrained, free, strict=False) for request in pair] + constrained[
        num_free:
    ]


def text_of(completion: Completion, tokenizer: Tokenizer) -> str:
    ids = completion.token_ids
    return str(tokenizer.decode(ids[: -1 if ids[-1:] == [END] else None], skip_special_tokens=False))


def test_answers_are_what_their_grammars_say(folder: Path, runner: ModelRunner, tokenizer: Tokenizer) -> None:
    requests = mixed()
    answers = InProcessEngine(config_of(folder), runner).serve(requests)
    for request, answer in zip(requests, answers, strict=True):
        if request.sampling.grammar is not None:
            assert answer.finish_reason in ("stop", "complete"), (request, answer.error)
            assert re.fullmatch(PATTERNS[request.sampling.grammar], text_of(answer, tokenizer))
    assert len({text_of(answer, tokenizer) for answer in answers}) > 10


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_tokens": 7}, {"max_num_requests": 3}, {"kv_memory": 110_000}],
    ids=["together", "in chunks", "few at a time", "preempted"],
)
def test_company_changes_nothing(folder: Path, runner: ModelRunner, options: dict[str, Any]) -> None:
    """Tokens and log probabilities, of requests with and without a grammar."""
    requests = mixed()
    alone = InProcessEngine(config_of(folder, prefix_caching=False), runner).serve_alone(requests)
    if "kv_memory" in options:
        runner = build_runner(config_of(folder, **options), lambda done, total: None)
    engine = InProcessEngine(config_of(folder, **options), runner)
    together = engine.serve(requests)
    assert (engine.scheduler.counters.preemptions > 0) == ("kv_memory" in options)
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_log_probabilities_are_those_of_the_raw_logits(folder: Path, runner: ModelRunner) -> None:
    """What the model gives the same text where no grammar is."""
    request = asking("a", WORDS, logprobs=0)
    (answer,) = InProcessEngine(config_of(folder), runner).serve([request])
    prompt = [*request.prompt, *answer.token_ids]
    scoring = asking("b", None, prompt=prompt, prompt_logprobs=0, max_tokens=0)
    (scored,) = InProcessEngine(config_of(folder), runner).serve([scoring])
    expected = scored.prompt_logprobs[len(request.prompt) - 1 :]
    assert [entry.token_id for entry in expected] == answer.token_ids
    assert [entry.logprob for entry in answer.logprobs] == [entry.logprob for entry in expected]


@pytest.mark.parametrize(
    ("grammar", "sampling", "num_tokens", "reason"),
    [
        ("start: /a*/", {"min_tokens": 9, "logit_bias": {END: 100.0}}, 9, "stop"),
        # Nothing can follow: there is the end, whatever else is asked, also at the last token that may come.
        ('start: "\\n"', {"min_tokens": 9}, 1, "complete"),
        ('start: "\\n"', {"max_tokens": 1}, 1, "complete"),
        ('start: "\\n"', {"logit_bias": {END: -100.0}}, 1, "complete"),
        # Something could, though nothing must.
        ("start: /\\n+/", {"max_tokens": 1}, 1, "length"),
        ('start: ""', {}, 0, "stop"),
        ("start: /a+/", {"logit_bias": {END: -100.0}, "max_tokens": 12}, 12, "length"),
        (NESTED, {"max_tokens": 0}, 0, "length"),
    ],
)
def test_where_an_answer_ends(
    folder: Path,
    runner: ModelRunner,
    grammar: str,
    sampling: dict[str, Any],
    num_tokens: int,
    reason: str,
) -> None:
    (answer,) = InProcessEngine(config_of(folder), runner).serve([asking("a", grammar, **sampling)])
    assert answer.finish_reason == reason
    assert len(answer.token_ids) - (reason == "stop") == num_tokens


@pytest.mark.parametrize(
    ("grammar", "stop_token_ids", "why"),
    [
        ("start: nothing", (END,), "nothing"),
        ("start: /[/", (END,), "regex"),
        ("start: <no_such_token>", (END,), "no_such_token"),
        # The only token that could come next is one that may come only at the end.
        ('start: "a"', (END, 67), "no token of the model can go on"),
        ("start: /a/", (), "stop_token_ids"),
        ("x" * (MAX_GRAMMAR_LEN + 1), (END,), "characters"),
    ],
)
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    folder: Path,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    grammar: str,
    stop_token_ids: tuple[int, ...],
    why: str,
) -> None:
    assert tokenizer.token_to_id("a") == 67
    requests = [asking("a", grammar, stop_token_ids=stop_token_ids), asking("b", YES_OR_NO)]
    failed, other = InProcessEngine(config_of(folder), runner).serve(requests)
    assert failed.finish_reason == "error"
    assert failed.error is not None and why in failed.error
    assert other.finish_reason == "complete"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DATA, VOCAB_SIZE)


def state_of(compiler: GrammarCompiler, grammar: str, output: list[int], **sampling: Any) -> RequestState:
    params = SamplingParams(grammar=grammar, stop_token_ids=(END, 1), **sampling)
    state = RequestState(Request(id="a", prompt=[5], sampling=params), output=output)
    state.matcher = compiler.matcher(params)
    return state


def allowed(*states: RequestState) -> list[set[int]]:
    bits = TokenMasks(0).start(states).result().bits
    assert bits is not None and bits.dtype == np.int32
    rows = np.unpackbits(bits.view(np.uint8), axis=1, count=VOCAB_SIZE, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def test_exactly_the_request_s_ends_come_where_a_grammar_is_complete(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = r"start: /x(yz?)?/"
    x, y, z = (tokenizer.token_to_id(letter) for letter in "xyz")
    outputs = ([], [x], [x, y], [x, y, z])
    at_once = allowed(*(state_of(compiler, grammar, output) for output in outputs))
    assert [{END, 1} & ids for ids in at_once] == [set(), {END, 1}, {END, 1}, {END, 1}]
    assert [ids - {END, 1} for ids in at_once] == [{x}, {y}, {z}, set()]
    waiting = [state_of(compiler, grammar, output, min_tokens=3) for output in outputs[:3]]
    assert [ids & {END, 1} for ids in allowed(*waiting)] == [set()] * 3


def test_a_mask_follows_from_the_output_however_that_came(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Token by token, each looked at twice as when a step is done again, and all at once."""
    ids = tokenizer.encode('{"on":true,"size":20}', add_special_tokens=False).ids
    growing = state_of(compiler, PAIR, [])
    for length in range(len(ids) + 1):
        growing.output = ids[:length]
        expected = allowed(state_of(compiler, PAIR, ids[:length]))
        assert allowed(growing) == allowed(growing) == expected
    assert expected == [{END, 1}]


def test_requests_without_a_grammar_are_not_masked(compiler: GrammarCompiler) -> None:
    free = RequestState(Request(id="b", prompt=[5], sampling=SamplingParams()))
    assert TokenMasks(0).start([free]).result().bits is None
    assert allowed(free, state_of(compiler, YES_OR_NO, []))[0] == set(range(VOCAB_SIZE))


# What a model says freely, until it calls a tool.
CALL = 'call: <[516]> "\\n"? "f(" /[0-9]+/ ")" <|end|>'


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        pytest.param(
            f"start: text (call text)*\ntext: <[^516]>*\n{CALL}",
            [["hello"], ["a", 514, "b", 516, "f(12)", 517], [516, "\nf(1)", 517, 516, "f(2)", 517, "end"]],
            [["a", 516, "g"], ["a", 516, "f()"], [516, 514]],
            id="a token starts a call",
        ),
        pytest.param(
            f"start: text call (text call)*\ntext: <[^516]>*\n{CALL}",
            [["a", 516, "f(12)", 517]],
            [["a", 516, "f(1)", 517, 516, 517]],
            id="a call must come",
        ),
        pytest.param(
            'start: call* REST\ncall: head "f(" /[0-9]+/ ")</fn>"\nhead[lazy]: REST "<fn>"\nREST: /(?s:.*)/',
            [["hello"], ["a < b"], ["a<f", "n>f(1", ")</fn> then <fn>f(2)</fn>"]],
            [["a<fn>g"], ["<fn", ">f()"], ["a", 516]],
            id="a string starts a call",
        ),
        pytest.param(
            json.dumps(
                {
                    "grammars": [
                        {"name": "all", "lark_grammar": "start: <[^515]>* <|thought|> /[\\n ]{0,4}/ @answer"},
                        {"name": "answer", "lark_grammar": PAIR},
                    ]
                }
            ),
            [['I think {"on":', 514, 515, '\n\n{"on":true,"size":1}'], [515, '{"on":true,"size":1}']],
            [["thought", 515, "so"], [515, "\n" * 5]],
            id="a token ends the thoughts",
        ),
        pytest.param(
            json.dumps(
                {
                    "grammars": [
                        {
                            "name": "all",
                            "lark_grammar": "start: thought /[\\n ]{0,4}/ @answer\n"
                            'thought[lazy]: /(?s:.*)/ "</think>"',
                        },
                        {"name": "answer", "lark_grammar": 'start: "yes" | "no"'},
                    ]
                }
            ),
            [["hm</th", "ink>\nyes"], ["</think>no"]],
            [["hm</think>maybe"], ["</think>\n", 515]],
            id="a string ends the thoughts",
        ),
    ],
)
def test_free_text_comes_before_what_is_constrained(
    tmp_path: Path, grammar: str, accepted: list[list[str | int]], refused: list[list[str | int]]
) -> None:
    """Tokens 514 to 517 are added ones; those without the mark `special` are no text to llguidance either."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(f"<pad{i}>", special=True) for i in range(2)])
    tokenizer.add_tokens([AddedToken("<|thinks|>", special=True), AddedToken("<|thought|>", special=False)])
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("<|end|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, tokenizer.get_vocab_size())

    def ids_of(parts: list[str | int]) -> list[int]:
        found: list[int] = []
        for part in parts:
            found += [part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False).ids
        return found

    def fits(ids: Sequence[int]) -> bool:
        return all(ids[i] in allowed(state_of(compiler, grammar, list(ids[:i])))[0] for i in range(len(ids)))

    for parts in accepted:
        assert fits([*ids_of(parts), END]), parts
    for parts in refused:
        assert not fits(ids_of(parts)), parts


def sentencepiece() -> Tokenizer:
    """With a decoder that is one `Metaspace`."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁yes", "▁no", "y", "e", "s", "n", "o"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return tokenizer


@pytest.mark.parametrize("vocab_size", [8, 11, 40])
def test_tokenizers_of_other_kinds_and_sizes_serve(tmp_path: Path, vocab_size: int) -> None:
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    state = state_of(GrammarCompiler(tmp_path, vocab_size), 'start: " yes" | "no"', [], min_tokens=0)
    assert allowed(state)[0] == {3, 4, 9}


@pytest.mark.parametrize("content", [None, b"{}", b"no json"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        state_of(GrammarCompiler(tmp_path, 512), YES_OR_NO, [])


def test_grammars_are_compiled_on_a_thread_in_order() -> None:
    grammars = ModelGrammars(GrammarCompiler(DATA, VOCAB_SIZE))
    results: list[tuple[str, Compiled]] = []
    done = threading.Event()
    for grammar in (YES_OR_NO, "start: /[/", NUMBER):
        sampling = SamplingParams(grammar=grammar, stop_token_ids=(END,))

        def take(result: Compiled, grammar: str = grammar) -> None:
            assert threading.current_thread() is not threading.main_thread()
            results.append((grammar, result))
            if len(results) == 3:
                done.set()

        grammars.compile(sampling, take)
    assert done.wait(PATIENCE)
    assert [grammar for grammar, _ in results] == [YES_OR_NO, "start: /[/", NUMBER]
    assert [type(result) for _, result in results] == [Matcher, RequestError, Matcher]
