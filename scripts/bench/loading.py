"""How much host memory a worker takes to load: its own experts straight from the files, beside the model loaded whole.

Makes a checkpoint of random weights (Qwen3-MoE's form, one tensor an expert, several files), then loads one rank's
share in a process of its own for each row and reads the most memory (RssAnon, and RssShmem, where the
slab lies) that it had.

    python scripts/bench/loading.py --experts 64 --layers 8 --out docs/measured/loading.json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MB = 1e6
ROWS = ("whole", "share")


def make_checkpoint(folder: Path, *, layers: int, experts: int, hidden: int, width: int) -> int:
    """Write a model folder; returns the bytes of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden,
        moe_intermediate_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        vocab_size=1024,
        num_experts=experts,
        num_experts_per_tok=4,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load_one(folder: Path, how: str, ranks: int) -> dict[str, float]:
    """In this process: load rank 0's share of `ranks`, and report what it took."""
    import torch

    from placement.baselines import linear_placement
    from workers.expert_source import ModuleExperts
    from workers.loading import fill_slab, load_model, load_share, shape_of
    from workers.options import RecorderOptions, WorkerOptions

    options = WorkerOptions(model=folder, recorder=RecorderOptions(folder=None), dtype="bfloat16")
    before = _private_bytes()
    peak = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    device = torch.device("cpu")
    if how == "whole":
        model = load_model(options, device)
        experts: Any = ModuleExperts(model)
    else:
        model, experts = load_share(options, device)
    shape = shape_of(model)
    rows = -(-shape.num_experts // ranks)
    placement = linear_placement(shape.num_layers, shape.num_experts, ranks, rows)
    slab = fill_slab(experts, placement, rank=0, spare=1.0, pin=False)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {"peak_mb": (peak[0] - before) / MB, "slab_mb": slab.num_bytes / MB, "seconds": seconds}


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    if len(found) != 2:
        raise RuntimeError("no RssAnon and RssShmem in /proc/self/status: this benchmark needs Linux")
    return sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "HOW", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, how, ranks = options.one
        print(json.dumps(load_one(Path(folder), how, int(ranks))))
        return
    found = []
    with tempfile.TemporaryDirectory() as name:
        size = make_checkpoint(
            Path(name), layers=options.layers, experts=options.experts, hidden=options.hidden, width=options.width
        )
        print(f"checkpoint: {size / MB:.0f} MB")
        print(f"{'ranks':>5} {'loaded':>7} {'peak MB':>8} {'slab MB':>8} {'of checkpoint':>13} {'seconds':>8}")
        for ranks in options.ranks:
            for how in ROWS:
                command = [sys.executable, __file__, "--one", name, how, str(ranks)]
                run = subprocess.run(command, capture_output=True, text=True, check=True)
                row = json.loads(run.stdout) | {"ranks": ranks, "loaded": how}
                found.append(row)
                print(
                    f"{ranks:>5} {how:>7} {row['peak_mb']:>8.0f} {row['slab_mb']:>8.0f} "
                    f"{row['peak_mb'] * MB / size:>13.2f} {row['seconds']:>8.1f}"
                )
    if options.out is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
            "commit": commit,
            "checkpoint_mb": size / MB,
            "rows": found,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
