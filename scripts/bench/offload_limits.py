"""Where offloading stops making sense, from what offload.py measured: requests a second by share of slots.

A GPU with a part of the experts in slots carries so many requests a second, at so many milliseconds a token; with all
experts resident it carries many more, but it takes 1 / share GPUs to hold them. Below the first figure offloading
saves GPUs; above it the experts belong on more GPUs. Only expert layers are counted, as in offload.py: attention adds
the same to both sides.

    python scripts/bench/offload_limits.py docs/measured/offload.json --new-tokens 256
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DECODE_BATCHES = (1, 8, 32)


def limits(rows: list[dict[str, Any]], new_tokens: int) -> list[dict[str, float]]:
    """For each decode batch and share: requests/s with these slots, and of each of the 1 / share GPUs without."""
    resident = {row["batch"]: row["moetis_ms"] for row in rows if row["what"] == "resident"}
    found = []
    for row in rows:
        if row["what"] == "cached" and row["batch"] in DECODE_BATCHES:
            batch, share = row["batch"], row["share"]
            whole = batch / resident[batch] * 1e3 / new_tokens
            found.append(
                {
                    "batch": batch,
                    "share": share,
                    "requests_per_s": row["tokens_per_s"] / new_tokens,
                    "ms_per_token": row["ms"],
                    "resident_requests_per_s": whole,
                    "resident_per_gpu": whole * share,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="the JSON of offload.py")
    parser.add_argument("--new-tokens", type=int, default=256, help="of a request")
    options = parser.parse_args()
    print(
        f"{'batch':>5} {'slots':>6} {'requests/s':>10} {'ms a token':>10} {'all resident':>12} {'of each GPU then':>16}"
    )
    for row in limits(json.loads(options.measured.read_text())["rows"], options.new_tokens):
        print(
            f"{row['batch']:5.0f} {row['share']:6.0%} {row['requests_per_s']:10.2f} {row['ms_per_token']:10.1f} "
            f"{row['resident_requests_per_s']:12.1f} {row['resident_per_gpu']:16.1f}"
        )


if __name__ == "__main__":
    main()
