"""Prompts that end in the assistant's last message, against transformers' own."""

from __future__ import annotations

import pytest
from fake_models import write_model
from test_templates import CHATML, GEMMA, LLAMA3, MISTRAL, SPECIAL, TALK
from transformers.utils.chat_template_utils import render_jinja_template

from quantd.daemon.chat_format import ChatFormat
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.errors import RequestError


@pytest.fixture(scope="module")
def make_format(tmp_path_factory: pytest.TempPathFactory):
    tokenizer = Tokenizer.load(write_model(tmp_path_factory.mktemp("model")))
    return lambda source: ChatFormat(ChatTemplate(source, SPECIAL), tokenizer)


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA3, MISTRAL, GEMMA], ids=["chatml", "llama3", "mistral", "gemma"]
)
@pytest.mark.parametrize("begun", ["It is", " It is ", "It\n", "is", "{", "<|im_end|>x"])
def test_goes_on_as_transformers(make_format, source: str, begun: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": begun}]
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, continue_final_message=True, **SPECIAL
    )
    prompt = make_format(source).prompt(messages, None, continues=True)
    assert prompt.text == expected


def test_nothing_to_go_on_with(make_format) -> None:
    hides = make_format("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="too little"):
        hides.prompt([*TALK, {"role": "assistant", "content": "x"}], None, continues=True)
