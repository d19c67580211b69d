"""From a request's text or messages to token ids, by the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from cluster.gateway.errors import ApiError
from cluster.gateway.protocol import Message


def completion_prompt(tokenizer: Any, prompt: str | list[int]) -> tuple[int, ...]:
    """A text's token ids; ids are taken as they are."""
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    return tuple(prompt)


def chat_prompt(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """The messages in the model's template, up to where the assistant begins; in plain lines where it has none.

    Raises ApiError where the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        return tuple(tokenizer(plain_chat(messages))["input_ids"])
    turns = [{"role": message.role, "content": message.text} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise ApiError(400, f"the model's chat template refuses these messages: {error}", param="messages") from error
    return tuple(ids)


def plain_chat(messages: Sequence[Message]) -> str:
    """`role: text`, a line a message, and the assistant's turn to go on."""
    return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant:"
