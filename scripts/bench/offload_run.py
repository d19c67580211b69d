"""All that is measured of offloading on one GPU, in one call: each part a process with a limit of its own.

    python scripts/bench/offload_run.py --trace mixed-64e-12l.npz --out FOLDER --seconds 460

Parts write their JSON into FOLDER as they go, so that what was cut off leaves what it had. Parts for which too little
time is left are not begun. Without a GPU a small model runs: a trial of the script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LEAST_SECONDS = 15.0
TO_WRITE_S = 10.0
TESTS = (
    "tests/workers/test_staging.py",
    "tests/workers/test_cuda_runtime.py",
    "tests/workers/test_fused_kernel.py",
    "tests/workers/test_bounce_cuda.py",
    "tests/gpu/test_relief_on_gpu.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process. limit_s: after so long it is ended."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


def parts(trace: Path, out: Path, commit: str, soak_seconds: float, freetoken: Path | None) -> list[Part]:
    bench = ("--trace", str(trace), "--commit", commit)

    def offload(name: str, stages: str, limit_s: float, *more: str) -> Part:
        file = str(out / f"offload-{name}.json")
        return Part(
            name=name,
            arguments=("scripts/bench/offload.py", "--stage", stages, *bench, "--out", file, *more),
            limit_s=limit_s,
        )

    lookup = ("scripts/bench/lookup.py", "--trace", str(trace), "--out", str(out / "lookup.json"))
    ahead = ("scripts/bench/prefetch_device.py", *bench, "--out", str(out / "prefetch-gpu.json"))
    beside = ("--freetoken", str(freetoken), *bench, "--out", str(out / "beside-freetoken.json"))
    rivals = (
        []
        if freetoken is None
        else [Part(name="freetoken", arguments=("scripts/bench/beside_freetoken.py", *beside), limit_s=180)]
    )
    return [
        Part(name="lookup", arguments=lookup, limit_s=90),
        offload("small", "copies,small,launches", 150),
        Part(name="prefetch", arguments=ahead, limit_s=150),
        *rivals,
        offload("table", "cached,resident,peers", 170),
        offload("qwen3", "copies,cached,resident,peers", 200, "--shape", "qwen3"),
        offload("soak", "tiers,soak", 60 + soak_seconds, "--soak-seconds", str(soak_seconds)),
        offload("mixtral", "copies,cached,resident,peers", 140, "--shape", "mixtral"),
        Part(
            name="long",
            arguments=("scripts/bench/long_context.py", "--commit", commit, "--out", str(out / "long.json")),
            limit_s=240,
        ),
        Part(name="tests", arguments=("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS), limit_s=90),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=460.0, help="of all parts together")
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="names of parts, comma-separated")
    parser.add_argument("--freetoken", type=Path, help="the folder that FreeToken's package lies in, if it is here")
    parser.add_argument("--commit", default="", help="for machines without git")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    failed = []
    for part in parts(options.trace, options.out, options.commit, options.soak_seconds, options.freetoken):
        left = end - time.monotonic()
        if options.only and part.name not in options.only.split(","):
            continue
        if left < LEAST_SECONDS:
            failed.append(f"{part.name}: no time left")
            continue
        begun = time.monotonic()
        print(f"== {part.name}", flush=True)
        process = subprocess.Popen([sys.executable, *part.arguments])
        try:
            code = process.wait(min(left, part.limit_s))
            ended = f"exit {code}"
        except subprocess.TimeoutExpired:
            code, ended = 124, "cut off"
            process.terminate()  # Who writes as it goes, or at its end, has what it has.
        finally:
            try:
                process.wait(TO_WRITE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        print(f"== {part.name}: {ended} after {time.monotonic() - begun:.0f} s", flush=True)
        if code:
            failed.append(f"{part.name}: {ended}")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
