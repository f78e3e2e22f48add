"""The layouts of prompts towards a suffix, one for each family of models that learnt it.

What a family's layout leaves open is named plainly: clients tell neither repository nor file. Which family
a model is of is read from the names of its tokenizer's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from quantd.daemon.infill import InfillFormat, InfillWriter
from quantd.daemon.tokenizer import Tokenizer

_FIM = "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>{middle}"
_OLD_FIM = "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>{middle}"
_OLD_FIM_PATH = "<fim_prefix>file\n{prefix}<fim_suffix>{suffix}<fim_middle>{middle}"
_CODEGEEX = (
    "###LANGUAGE:\n###MODE:BLOCK\n"
    "<|code_suffix|>{suffix}<|code_prefix|>{prefix}<|code_middle|><|assistant|>\n{middle}"
)
_PLAIN_FILE = "{path}\n{text}\n"

# Of families that share tokens the one with more of them comes first.
FORMATS: tuple[InfillFormat, ...] = (
    # Qwen2.5-Coder technical report (arXiv 2409.12186).
    InfillFormat(
        "Qwen coder",
        alone=_FIM,
        among="<|repo_name|>repository\n{files}<|file_sep|>file\n" + _FIM,
        other="<|file_sep|>{path}\n{text}\n",
        ends=("<|fim_pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
    # Granite 4: the tokens of Granite 3 in the newer spelling.
    InfillFormat(
        "Granite 4",
        alone=_FIM,
        among="<|reponame|>repository{files}<|filename|>file\n" + _FIM,
        other="<|filename|>{path}\n{text}",
        ends=("<|fim_pad|>", "<|end_of_text|>"),
    ),
    # ai.google.dev, CodeGemma prompt structure.
    InfillFormat(
        "CodeGemma",
        alone=_FIM,
        among="{files}" + _FIM,
        other="{text}<|file_separator|>",
        ends=("<end_of_turn>", "<eos>"),
    ),
    InfillFormat("FIM tokens", alone=_FIM, among="{files}" + _FIM, other=_PLAIN_FILE, ends=("<|fim_pad|>",)),
    # StarCoder 2 (arXiv 2402.19173).
    InfillFormat(
        "StarCoder2",
        alone=_OLD_FIM,
        among="<repo_name>repository{files}<file_sep>" + _OLD_FIM_PATH,
        other="<file_sep>{path}\n{text}",
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    # StarCoder (arXiv 2305.06161); Granite code and Granite 3 have its tokenizer.
    InfillFormat(
        "StarCoder, Granite and StableCode",
        alone=_OLD_FIM,
        among="<reponame>repository{files}<filename>file\n" + _OLD_FIM,
        other="<filename>{path}\n{text}",
        ends=("<fim_pad>", "<|endoftext|>", "<|end_of_text|>"),
    ),
    InfillFormat(
        "FIM tokens",
        alone=_OLD_FIM,
        among="{files}" + _OLD_FIM,
        other=_PLAIN_FILE,
        ends=("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    # Code Llama's infilling_prompt_tokens: the prefix begins with a space of its own, the suffix does not.
    InfillFormat(
        "Code Llama",
        alone="▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>{middle}",
        among="{files}▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>{middle}",
        other=_PLAIN_FILE,
        ends=("▁<EOT>",),
    ),
    # DeepSeek-Coder (arXiv 2401.14196); its README names files of a repository in comments.
    InfillFormat(
        "DeepSeek Coder",
        alone="<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>{middle}",
        among="<｜fim▁begin｜>{files}#file\n{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>{middle}",
        other="#{path}\n{text}\n",
    ),
    # mistral-common's encode_fim; several files as Mistral gave them to Continue.
    InfillFormat(
        "Codestral",
        alone="[SUFFIX]{suffix}[PREFIX]{prefix}{middle}",
        among="[SUFFIX]{suffix}[PREFIX]{files}+++++ file\n{prefix}{middle}",
        other="+++++ {path}\n{text}\n\n",
        stops=("\n+++++ ",),
    ),
    # Seed-Coder (arXiv 2506.03524).
    InfillFormat(
        "Seed-Coder",
        alone="<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>{middle}",
        among="<[fim-suffix]>{suffix}<[fim-prefix]>{files}{prefix}<[fim-middle]>{middle}",
        other=_PLAIN_FILE,
    ),
    # GLM-4.5 and later, which can think, as Zed asks them.
    InfillFormat(
        "GLM",
        marks=("<think>",),
        alone="<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>{middle}",
        among="{files}<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>{middle}",
        other=_PLAIN_FILE,
        ends=("<|user|>", "<|endoftext|>"),
    ),
    # CodeGeeX4's Infilling_guideline.md.
    InfillFormat(
        "CodeGeeX",
        alone="<|user|>\n###PATH:file\n" + _CODEGEEX,
        among="<|user|>\n{files}###PATH:file\n" + _CODEGEEX,
        other="###REFERENCE:\n###PATH:{path}\n{text}\n",
        ends=("<|endoftext|>",),
    ),
)


def infill_writer(tokenizer: Tokenizer) -> InfillWriter | None:
    """What writes prompts towards a suffix for the family that the tokenizer's tokens are of."""
    format = format_of(lambda name: tokenizer.token_id(name) is not None)
    return None if format is None else InfillWriter(tokenizer, format)


def format_of(has_token: Callable[[str], bool]) -> InfillFormat | None:
    """The first format all of whose tokens there are."""
    return next((item for item in FORMATS if all(map(has_token, (*item.controls, *item.marks)))), None)
