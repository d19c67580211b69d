"""Cache policies beside Belady's optimum on routing traces, as a table and as JSON.

    python scripts/bench/cache.py TRACE... --batch 1,8,32 --out docs/measured/cache.json

Fitted on the even requests, judged on the odd ones; demand lookups alone, nothing is prefetched.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from cluster.cache import cache_table, numbers_of, shares_of
from placement.cache.score import score_policies
from placement.trace import load_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="+", type=Path)
    parser.add_argument("--slots", default="10%,25%,50%")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.processor() or platform.system()}",
        "commit": commit.strip(),
        "traces": {},
    }
    for path in options.trace:
        trace = load_trace(path)
        begun = time.perf_counter()
        scores = list(
            score_policies(trace, shares=shares_of(options.slots), batches=numbers_of(options.batch, "--batch"))
        )
        seconds = time.perf_counter() - begun
        Console(width=160).print(path.stem, cache_table(scores), f"{seconds:.0f} s")
        result["traces"][path.stem] = {"seconds": seconds, "scores": [score.to_dict() for score in scores]}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
