"""Several GPUs of one host: are outputs right, and what do exchange, migration, placements and offloading reach?

    python scripts/bench/multigpu.py --out multigpu.json                       # on a machine with GPUs, over NCCL
    python scripts/bench/multigpu.py --tiny --only correctness,exchange        # on a CPU, over gloo
    python scripts/bench/multigpu.py --make-cases cases.pkl --trace mixed.npz  # plan for stage placement

Bare processes, one a GPU, with the project's own workers/ code. Every stage can be run alone (--only) and prints what
it compares with from the same run. docs/multigpu.md says what was found.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STAGES = ("correctness", "exchange", "migration", "placement", "offload")


def run(options: argparse.Namespace, stages: tuple[str, ...], num_ranks: int) -> Iterator[list[dict[str, Any]]]:
    """Rows as they come. Correctness takes a set of processes a model, since a rank dies in it; the other stages share
    one."""
    from multigpu_crew import Job, run_crew
    from multigpu_stages import live_correctness, live_measures

    common = {"num_ranks": num_ranks, "tiny": options.tiny, "before": options.before}
    measures = tuple(stage for stage in stages if stage != "correctness")
    if measures:
        cases = pickle.loads(options.cases.read_bytes()) if options.cases else None
        rows = run_crew(live_measures, Job(stages=measures, cases=cases, **common))
        yield rows
        if "placement" in measures:
            from multigpu_placement import judge

            yield judge(rows, cases, tiny=options.tiny)
    if "correctness" in stages:
        for which in range(2):
            yield run_crew(functools.partial(live_correctness, which), Job(stages=("correctness",), **common))


def machine() -> str:
    import torch

    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    return f"{gpus}{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


def head_commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()


def save(options: argparse.Namespace, num_ranks: int, rows: list[dict[str, Any]]) -> None:
    """After each part, so that a run that is cut off leaves what it has."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": options.commit,
        "ranks": num_ranks,
        "rows": rows,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STAGES), help="stages, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU over gloo")
    parser.add_argument("--ranks", type=int, help="as many as there are GPUs, 2 with --tiny, unless given")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", default=head_commit(), help="for the JSON, where there is no git")
    parser.add_argument("--before", type=Path, help="an older workers/exchange.py to time beside")
    parser.add_argument("--cases", type=Path, help="what --make-cases wrote; made anew if absent")
    parser.add_argument("--make-cases", type=Path, help="plan for the stage `placement`, write it here, and end")
    parser.add_argument("--trace", type=Path, help="the trace that --make-cases plans from")
    options = parser.parse_args()
    stages = tuple(options.only.split(","))
    unknown = set(stages) - set(STAGES)
    if unknown:
        parser.error(f"--only: unknown stages {sorted(unknown)}; there are {', '.join(STAGES)}")
    import torch

    num_ranks = options.ranks or (2 if options.tiny else torch.cuda.device_count())
    if options.make_cases:
        from multigpu_placement import make_cases

        options.make_cases.write_bytes(pickle.dumps(make_cases(options.trace, max(2, num_ranks), tiny=options.tiny)))
        return 0
    if num_ranks < 2:
        parser.error(f"this needs 2 GPUs or more, and there are {num_ranks}; --tiny runs on a CPU")
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    rows: list[dict[str, Any]] = []
    for more in run(options, stages, num_ranks):
        rows += more
        if options.out:
            save(options, num_ranks, rows)
    wrong = [row["what"] for row in rows if row.get("equal") is False]
    if wrong:
        print(f"not equal: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
