"""`moetis demo`, from start to report."""

from __future__ import annotations

import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig, load_config
from cluster.demo import AFTER, BEFORE, Demo, DemoResult, check_texts, load_prompts, score_served
from cluster.fleet import Fleet
from cluster.local_ray import local_cluster
from cluster.rundir import held
from cluster.terminal import LOG
from placement.errors import ConfigError
from placement.topology import load_topology

ROOT = Path(__file__).resolve().parent.parent
DEMO_CONFIG = ROOT / "configs" / "clusters" / "demo.yaml"
DEMO_PROMPTS = ROOT / "configs" / "prompts" / "demo.jsonl"


def demo_config(run_dir: Path) -> ClusterConfig:
    """The demo's cluster, with its own paths made absolute so that it runs from any working directory."""
    config = load_config(DEMO_CONFIG)
    return config.model_copy(
        update={
            "model": ROOT / config.model,
            "topology": str(ROOT / config.topology),
            "run_dir": run_dir,
        }
    )


def run_demo(config: ClusterConfig, prompts_path: Path, *, num_prompts: int, max_new_tokens: int) -> DemoResult:
    """Run all phases on a cluster of their own and check them; progress goes to stderr."""
    start = time.perf_counter()
    if config.trace_dir.exists():
        raise ConfigError(f"--run-dir '{config.run_dir}': holds an earlier run; give a folder that does not exist yet")
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=LOG) as progress:
        prompts = load_prompts(prompts_path, config.model, num_prompts)
        task = progress.add_task("starting a local Ray cluster", total=None)
        num_cpus = load_topology(config.topology).num_ranks
        with (
            held(config.run_dir),
            local_cluster(name=config.name, num_cpus=num_cpus, object_store_mb=config.ray.object_store_mb),
            Fleet(config, note=lambda text: progress.update(task, description=text)) as fleet,
        ):
            progress.update(task, description=f"{num_cpus} workers serve", total=1, completed=1)
            demo = Demo(fleet, prompts, max_new_tokens=max_new_tokens, progress=progress)
            before = demo.serve(BEFORE, "serving on the first placement")
            during, rebalance = demo.serve_while_moving()
            after = demo.serve(AFTER, "serving on the new placement")
            topology = fleet.topology
        phases = (before, during, after)
        verdict = check_texts(config, prompts, phases, progress)
        score_before, score_after, held_out = score_served(config.trace_dir, rebalance.before, rebalance.plan, topology)
    return DemoResult(
        phases=phases,
        rebalance=rebalance,
        before=score_before,
        after=score_after,
        verdict=verdict,
        num_prompts=len(prompts),
        held_out=held_out,
        total_s=time.perf_counter() - start,
    )
