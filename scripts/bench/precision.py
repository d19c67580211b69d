"""What quantised experts cost in accuracy: the demo model's outputs with int8 and int4 experts beside those stored.

    python scripts/bench/precision.py --out docs/measured/precision.json

The model as stored (bfloat16) writes a text to each prompt, greedily; every model then reads prompt and text. logits
error: of all logits, ||difference|| / ||logits||, each position's mean taken out. tokens differ: positions of the text
where another token is the best. loss: mean negative log probability of the text's tokens. All else (attention, router)
stays as it is; all compute in float32, so that only the experts' bits make a difference.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from placement.fit.checkpoint import read_checkpoint
from placement.fit.precision import Precision
from placement.fit.sizing import expert_sizes
from workers.blob import round_trip
from workers.seam import experts_modules, num_experts_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """One precision. tokens: compared; weight_error: of the experts' weights, ||difference|| / ||weights||."""

    precision: str
    blob_bytes: int
    weight_error: float
    logits_error: float
    tokens: int
    tokens_differ: float
    loss: float


def compare(folder: Path, *, num_prompts: int, num_tokens: int) -> list[PrecisionRow]:
    """A row a precision, the first being the weights as stored."""
    # More threads than a busy machine has free cores make small matrix products slower by far.
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    lines = (ROOT / "configs" / "prompts" / "demo.jsonl").read_text().splitlines()
    # Spread over the file, whose prompts are sorted by kind.
    chosen = lines[:: max(1, len(lines) // num_prompts)][:num_prompts]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in chosen]
    model = _load(folder)
    texts = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=1,
        )[0]
        for prompt in prompts
    ]
    starts = [len(prompt) for prompt in prompts]
    expected = [_logits(model, text, start) for text, start in zip(texts, starts, strict=True)]
    weights = _weights(model)
    sizes = expert_sizes(read_checkpoint(folder))
    rows = []
    for precision in Precision:
        other = _load(folder)
        modules = experts_modules(other)
        for module in modules:
            round_trip(module, num_experts_of(module), precision)
        got = [_logits(other, text, start) for text, start in zip(texts, starts, strict=True)]
        difference, size = _norm(a - b for a, b in zip(got, expected, strict=True)), _norm(expected)
        differ = sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in zip(got, expected, strict=True))
        tokens = sum(len(logits) for logits in got)
        losses = [
            torch.nn.functional.cross_entropy(logits, text[start:], reduction="sum")
            for logits, text, start in zip(got, texts, starts, strict=True)
        ]
        rows.append(
            PrecisionRow(
                precision=precision.value,
                blob_bytes=sizes[precision],
                weight_error=float((_weights(other) - weights).norm() / weights.norm()),
                logits_error=difference / size,
                tokens=tokens,
                tokens_differ=differ / tokens,
                loss=float(sum(losses)) / tokens,
            )
        )
    return rows


def _load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm", local_files_only=True
    )
    return model.eval().requires_grad_(False)


def _logits(model: PreTrainedModel, text: torch.Tensor, start: int) -> torch.Tensor:
    """[tokens, vocabulary] with which the tokens from start on were chosen, each position's mean taken out."""
    with torch.inference_mode():
        logits = model(text.unsqueeze(0)).logits[0, start - 1 : -1].float()
    return logits - logits.mean(dim=1, keepdim=True)


def _weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([each.float().flatten() for module in experts_modules(model) for each in module.parameters()])


def _norm(parts: object) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "models" / "demo")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = compare(options.model, num_prompts=options.prompts, num_tokens=options.tokens)
    print(f"{rows[0].tokens} tokens")
    print(f"{'experts':<8} {'bytes':>7} {'weights':>9} {'logits':>9} {'differ':>9} {'loss':>7}")
    for row in rows:
        print(
            f"{row.precision:<8} {row.blob_bytes:>7} {row.weight_error:>9.3%} {row.logits_error:>9.3%} "
            f"{row.tokens_differ:>9.3%} {row.loss:>7.4f}"
        )
    if options.out is not None:
        git = ["git", "rev-parse", "--short", "HEAD"]
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": platform.processor() or platform.machine(),
            "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
