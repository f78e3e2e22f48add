"""One task for litellm, which is a library: `python litellm_task.py BASE KEY MODEL PROMPT`.

Streams the answer, runs the tool where it is called, and goes on with what that gave, once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "count_words",
        "description": "Count the words of a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 80}},
            "required": ["text"],
        },
    },
}


def answer(base: str, key: str, model: str, messages: list[Any]) -> Any:
    """The message of one streamed answer, printed as it comes."""
    chunks = []
    for chunk in litellm.completion(
        model=f"openai/{model}", api_base=base, api_key=key, messages=messages, tools=[TOOL], stream=True
    ):
        chunks.append(chunk)
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    return litellm.stream_chunk_builder(chunks).choices[0].message


def main() -> None:
    base, key, model, prompt = sys.argv[1:]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    message = answer(base, key, model, messages)
    if message.tool_calls:
        messages.append(message.model_dump())
        for call in message.tool_calls:
            number = len(json.loads(call.function.arguments)["text"].split())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(number)})
        answer(base, key, model, messages)


if __name__ == "__main__":
    main()
