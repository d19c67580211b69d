"""What clients may ask: OpenAI's completions and chat completions, as far as they are served here.

A parameter that would change the answer and is not served is refused, never ignored.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from workers.requests import MAX_TEMPERATURE, Sampling

MOST_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
LONGEST_STOP = 1000
LONGEST_SESSION = 512

_Text = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(_Strict):
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Text | list[_Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=LONGEST_SESSION)
    n: Literal[1] | None = None
    # Accepted where they ask for nothing that is not done anyway.
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings, got {len(value)}")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def new_tokens(self) -> int | None:
        """How many tokens at most are asked for."""
        return self.max_tokens

    def sampling(self) -> Sampling | None:
        """None is greedy: temperature 0. OpenAI's default is temperature 1; a request without a seed gets one."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:
            return None
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(temperature=temperature, top_p=1.0 if self.top_p is None else self.top_p, seed=seed)


class CompletionBody(_Common):
    """POST /v1/completions. prompt: a text or token ids; several prompts in one request are not served."""

    prompt: str | list[int]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
            if len(value) > 1:
                raise ValueError(f"one prompt a request, got {len(value)}")
            return value[0]
        return value


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
