"""`moetis serve`: a cluster behind stdin and stdout, one JSON object a line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.config import ClusterConfig
from cluster.fleet import Fleet, Generation
from cluster.local_ray import Contact, joined_cluster, local_cluster, write_contact
from cluster.terminal import LOG
from cluster.text import load_tokenizer
from placement.topology import first_problem, load_topology
from workers.requests import GenerationRequest

MAX_WAITING = 256


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    prompt: str | None = None
    max_new_tokens: int = Field(default=64, ge=1)
    stream: bool = False
    cancel: str | None = None


def run_serve(config: ClusterConfig, requests: TextIO, answers: TextIO) -> None:
    """Serve until requests ends. A line that can't be served gets an answer that says why; the others go on."""
    tokenizer = load_tokenizer(config.model)
    topology = load_topology(config.topology)
    with (
        _ray(config, topology.num_ranks) as contact,
        LOG.status("starting ...") as status,
        Fleet(config, note=lambda text: status.update(f"{text} ...")) as fleet,
    ):
        path = write_contact(config.run_dir, contact)
        try:
            status.stop()
            LOG.print(f"{topology.num_ranks} ranks serve '{config.model}'; requests on stdin, a JSON object a line")
            _Desk(fleet, tokenizer, answers).run(requests)
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _ray(config: ClusterConfig, num_ranks: int) -> Iterator[Contact]:
    if config.ray.address == "local":
        memory = config.ray.object_store_mb
        with local_cluster(name=config.name, num_cpus=num_ranks, object_store_mb=memory) as contact:
            yield contact
    else:
        with joined_cluster(config.ray.address) as contact:
            yield contact


class _Desk:
    """Takes lines, hands them to the fleet, and writes what comes back."""

    def __init__(self, fleet: Fleet, tokenizer: Any, answers: TextIO) -> None:
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._answers = answers
        self._running: dict[str, Generation] = {}
        self._lock = threading.Lock()

    def run(self, requests: TextIO) -> None:
        with ThreadPoolExecutor(max_workers=MAX_WAITING, thread_name_prefix="answers") as pool:
            for number, line in enumerate(requests, start=1):
                if line.strip():
                    self._take(number, line, pool)

    def _take(self, number: int, line: str, pool: ThreadPoolExecutor) -> None:
        try:
            wish = _Line.model_validate_json(line)
        except ValidationError as error:
            self._write({"id": None, "end": "failed", "error": f"line {number}: {first_problem(error)}"})
            return
        if wish.cancel is not None:
            with self._lock:
                generation = self._running.get(wish.cancel)
            if generation is not None:
                self._fleet.cancel(generation)
            return
        name = wish.id if wish.id is not None else str(number)
        if wish.prompt is None:
            self._write({"id": name, "end": "failed", "error": f"line {number}: needs 'prompt' or 'cancel'"})
            return
        with self._lock:
            if name in self._running:
                self._write({"id": name, "end": "failed", "error": f"line {number}: id '{name}' is running already"})
                return
        prompt = tuple(self._tokenizer(wish.prompt)["input_ids"])
        request = GenerationRequest(request=name, prompt=prompt, max_new_tokens=wish.max_new_tokens, stream=wish.stream)
        (generation,) = self._fleet.submit([request])
        with self._lock:
            self._running[name] = generation
        pool.submit(self._answer, name, generation)

    def _answer(self, name: str, generation: Generation) -> None:
        tokens: list[int] = []
        shown = 0
        for event in generation.events():
            tokens.extend(event.tokens)
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            if event.end is None and text.endswith("\ufffd"):
                # Half of a character: its other bytes come with the next tokens.
                continue
            if event.end is not None:
                with self._lock:
                    del self._running[name]
            said = {"id": name, "text": text[shown:], "tokens": len(tokens)}
            ending = {} if event.end is None else {"end": event.end}
            reason = {} if event.error is None else {"error": event.error}
            self._write(said | ending | reason)
            shown = len(text)

    def _write(self, answer: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
            self._answers.flush()
