"""What clients get: the objects of OpenAI's API, built from texts and counts; and the figures for Prometheus."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from cluster.gateway.relay import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The shape of one request's answers: chat or completion, whole or in chunks."""

    name: str
    created: int
    model: str
    chat: bool

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._head("chat.completion" if self.chat else "text_completion") | {"choices": [choice], "usage": usage}

    def chunk(self, text: str | None, finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """A piece of a stream."""
        if self.chat:
            delta = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": text or ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._chunk_head() | {"choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk, where the client asked for usage."""
        return self._chunk_head() | {"choices": [], "usage": usage}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}


def usage_of(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "moetis"}


def sse(answer: dict[str, Any] | str) -> str:
    """One server-sent event."""
    return f"data: {answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)}\n\n"


def prometheus_text(snapshot: Snapshot) -> str:
    """The figures in Prometheus's text format: counters since the gateway started, and gauges of now."""
    state, figures = snapshot.state, snapshot.figures
    lines = []
    for name, value in asdict(figures).items():
        unit = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
        lines += [f"# TYPE moetis_gateway_{unit}_total counter", f"moetis_gateway_{unit}_total {value}"]
    gauges = {
        "gateway_ready": int(state.ready),
        "gateway_running_requests": snapshot.running,
        "gateway_running_tokens": snapshot.running_tokens,
        "cluster_epoch": state.epoch,
        "cluster_ranks": state.ranks,
        "cluster_ranks_alive": state.ranks_alive,
        "cluster_steps": state.steps,
    }
    for name, value in gauges.items():
        lines += [f"# TYPE moetis_{name} gauge", f"moetis_{name} {value}"]
    return "\n".join(lines) + "\n"
