"""llama.cpp's grammars (GBNF) in Lark, by llguidance's own converter.

Rules without other rules become words, of which the longest counts where several begin alike: a rule for
white space takes a line's end that a rule behind it may want.

Source of the form: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re

from quantd.engine.errors import RequestError

MAX_LEN = 1 << 16

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_KNOWN_ESCAPES = '"\\[]nrtx'


def gbnf_to_lark(text: str, param: str) -> str:
    """Raises RequestError for `param` where the text is no such grammar or cannot be converted."""
    from llguidance.gbnf_to_lark import gbnf_to_lark as convert  # takes numpy along, which few requests need

    if len(text) > MAX_LEN:
        raise RequestError(f"{param}: a GBNF grammar has at most {MAX_LEN} characters", param)
    try:
        return str(convert(_ESCAPE.sub(_plainer, text)))
    # The converter raises a bare Exception for every fault of the text.
    except Exception as error:
        raise RequestError(f"{param}: not valid GBNF: {error}", param) from None


def _plainer(escape: re.Match[str]) -> str:
    """An escape as the converter takes it right: not by code point, and none that is not needed."""
    short, long, other = escape.groups()
    if other is not None:
        return escape[0] if other in _KNOWN_ESCAPES else _character(ord(other), escape)
    return _character(int(short or long, 16), escape)


def _character(code: int, escape: re.Match[str]) -> str:
    if code > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
