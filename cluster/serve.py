"""`moetis serve` without --http: a cluster behind stdin and stdout, one JSON object a line."""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.config import ClusterConfig
from cluster.fleet import Fleet, Generation
from cluster.opening import opened
from cluster.text import load_tokenizer
from placement.errors import MoetisError
from workers.events import TokenEvent
from workers.requests import GenerationRequest

MAX_WAITING = 256

# Lines of requests, what becomes of them, what ended the fleet, and None at the end of the lines.
Inbox = queue.SimpleQueue[bytes | TokenEvent | MoetisError | None]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    prompt: str | None = None
    max_new_tokens: int = Field(default=64, ge=1)
    stream: bool = False
    cancel: str | None = None


def run_serve(config: ClusterConfig, requests: int, answers: TextIO) -> None:
    """Serve until requests, a file descriptor, ends. A line that can't be served gets an answer that says why; the
    others go on."""
    tokenizer = load_tokenizer(config.model)
    inbox: Inbox = queue.SimpleQueue()
    with opened(config) as premises, premises.staffed(inbox.put) as cluster:
        ranks = cluster.topology.num_ranks
        with cluster.announced(f"{ranks} ranks serve '{config.model}'; requests on stdin, a JSON object a line"):
            Desk(cluster.fleet, tokenizer, inbox, answers).run(requests)


@dataclass(slots=True)
class _Answer:
    """A request under way: its tokens so far, and how many characters of their text have been written."""

    generation: Generation
    tokens: list[int] = field(default_factory=list)
    shown: int = 0


class Desk:
    """Takes lines, hands them to the fleet, and writes what comes back: all in the thread that calls run.

    Lines and events meet in one inbox, so that nothing here is shared. A reader thread alone waits for lines; it keeps
    MAX_WAITING of them at most.
    """

    def __init__(self, fleet: Fleet, tokenizer: Any, inbox: Inbox, answers: TextIO) -> None:
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._answers = answers
        self._running: dict[str, _Answer] = {}
        self._inbox = inbox
        self._room = threading.Semaphore(MAX_WAITING)

    def run(self, requests: int) -> None:
        """Until requests, a file descriptor, is at its end and all have ended. Raises what ended the fleet."""
        threading.Thread(target=self._read, args=(requests,), name="requests", daemon=True).start()
        number = 0
        at_end = False
        while not at_end or self._running:
            item = self._inbox.get()
            if item is None:
                at_end = True
            elif isinstance(item, TokenEvent):
                self._answer(item)
            elif isinstance(item, MoetisError):
                raise item
            else:
                self._room.release()
                number += 1
                if item.strip():
                    self._take(number, item)

    def _read(self, requests: int) -> None:
        # A file object of this thread's own: the interpreter can't end while a thread reads from sys.stdin.
        with open(requests, "rb", closefd=False) as lines:
            for line in lines:
                self._room.acquire()
                self._inbox.put(line)
        self._inbox.put(None)

    def _take(self, number: int, line: bytes) -> None:
        try:
            wish = _Line.model_validate_json(line)
        except ValidationError as error:
            self._write({"id": None, "end": "failed", "error": f"line {number}: {_problem(error)}"})
            return
        if wish.cancel is not None:
            if wish.cancel in self._running:
                self._fleet.cancel(self._running[wish.cancel].generation)
            return
        name = wish.id if wish.id is not None else str(number)
        if wish.prompt is None:
            self._write({"id": name, "end": "failed", "error": f"line {number}: needs 'prompt' or 'cancel'"})
            return
        if name in self._running:
            self._write({"id": name, "end": "failed", "error": f"line {number}: id '{name}' is running already"})
            return
        prompt = tuple(self._tokenizer(wish.prompt)["input_ids"])
        request = GenerationRequest(request=name, prompt=prompt, max_new_tokens=wish.max_new_tokens, stream=wish.stream)
        (generation,) = self._fleet.submit([request], events=self._inbox)
        self._running[name] = _Answer(generation)

    def _answer(self, event: TokenEvent) -> None:
        answer = self._running[event.request]
        answer.tokens.extend(event.tokens)
        text = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        if event.end is None and text.endswith("\ufffd"):
            # Half of a character: its other bytes come with the next tokens.
            return
        if event.end is not None:
            del self._running[event.request]
        said = {"id": event.request, "text": text[answer.shown :], "tokens": len(answer.tokens)}
        ending = {} if event.end is None else {"end": event.end}
        reason = {} if event.error is None else {"error": event.error}
        self._write(said | ending | reason)
        answer.shown = len(text)

    def _write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._answers.flush()


def _problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong with a line, as `key 'id': what (got value)`."""
    problem = error.errors(include_url=False)[0]
    key = f"key '{problem['loc'][0]}': " if problem["loc"] else ""
    given = problem["input"]
    text = given.decode(errors="replace").strip() if isinstance(given, bytes) else str(given)
    return f"{key}{problem['msg']} (got {text[:80]!r})"
