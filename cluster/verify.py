"""Does the cluster write what the plain model writes? Each token is checked against the plain Transformers model, or
each text against what that model writes.

The plain model reads prompt and answer in one pass; greedy text agrees with it exactly when each token of the answer is
the best one after what precedes it. Where it is not, the two best logits must lie within TIE of each other: then float
rounding decides, and the place is counted as a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cluster.text import load_tokenizer
from workers.blob import round_trip
from workers.loading import device_of, load_model
from workers.options import WorkerOptions
from workers.seam import experts_modules, num_experts_of

TIE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """tokens: how many were checked. ties: accepted differences. wrong: (answer, position) of the others."""

    answers: int
    tokens: int
    ties: int
    wrong: tuple[tuple[str, int], ...]


def verify(
    options: WorkerOptions,
    answers: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
    advance: Callable[[], None] = lambda: None,
) -> Verdict:
    """Check (name, prompt, tokens) of each answer against the plain model of options.model. advance: one is done."""
    model, device = _plain_model(options)
    num_answers = num_tokens = ties = 0
    wrong: list[tuple[str, int]] = []
    for name, prompt, tokens in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1].float()
        written = torch.tensor(tokens, device=device)
        best = logits.max(dim=-1).values
        gap = best - logits.gather(1, written.unsqueeze(1)).squeeze(1)
        different = (logits.argmax(dim=-1) != written).nonzero().flatten().tolist()
        for position in different:
            if gap[position] <= TIE:
                ties += 1
            else:
                wrong.append((name, position))
                break
        num_answers += 1
        num_tokens += len(tokens)
        advance()
    return Verdict(answers=num_answers, tokens=num_tokens, ties=ties, wrong=tuple(wrong))


def plain_texts(options: WorkerOptions, wishes: Sequence[tuple[str, int]]) -> list[str]:
    """What the plain model writes, greedily, to each (prompt, number of new tokens)."""
    tokenizer = load_tokenizer(options.model)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in plain_tokens(options, wishes)]


def plain_tokens(options: WorkerOptions, wishes: Sequence[tuple[str, int]]) -> list[list[int]]:
    """As `plain_texts`, the tokens."""
    model, device = _plain_model(options)
    tokenizer = load_tokenizer(options.model)
    longest: dict[str, int] = {}
    for prompt, number in wishes:
        longest[prompt] = max(number, longest.get(prompt, 0))
    # Prompts of the same length go together, so that none is padded.
    by_length: dict[int, dict[str, list[int]]] = {}
    for prompt in longest:
        ids: list[int] = tokenizer(prompt)["input_ids"]
        by_length.setdefault(len(ids), {})[prompt] = ids
    written: dict[str, list[int]] = {}
    for length, same in by_length.items():
        ids_of_all = torch.tensor(list(same.values()), device=device)
        number = max(longest[prompt] for prompt in same)
        mask = torch.ones_like(ids_of_all)
        out = model.generate(ids_of_all, attention_mask=mask, max_new_tokens=number, do_sample=False)
        written.update(zip(same, out[:, length:].tolist(), strict=True))
    return [written[prompt][:number] for prompt, number in wishes]


def _plain_model(options: WorkerOptions) -> tuple[PreTrainedModel, torch.device]:
    # More threads than a busy machine has free cores make small matrix products slower by far.
    torch.set_num_threads(options.threads)
    device = device_of(options.device)
    model = load_model(options, device)
    for module in experts_modules(model):
        # Quantised experts are those of another model, which is the one to compare with.
        round_trip(module, num_experts_of(module), options.expert_precision)
    return model.to(device), device
