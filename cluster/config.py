"""Configuration of a serving cluster: strict YAML, one file a cluster. Unknown keys and wrong types are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from placement.errors import ConfigError
from placement.fit.precision import Precision
from placement.topology import first_problem
from workers.options import RecorderOptions, WorkerOptions

HISTORY_FILE = "history.sqlite"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RayConfig(_Strict):
    """address 'local' starts a cluster of its own on this machine; anything else is the address of one to join.

    node_labels: the Ray labels of each node of the topology, in order; a rank's worker runs on a node that has them.
    """

    address: str = "local"
    node_labels: list[dict[str, str]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _labels_of_a_cluster(self) -> RayConfig:
        if self.node_labels and self.address == "local":
            raise ValueError("'node_labels' are of a cluster that is joined; 'address' is 'local'")
        return self

    object_store_mb: int = Field(default=128, ge=80)


class WorkerConfig(_Strict):
    """See workers.options.WorkerOptions for what each key means.

    slots 'auto': as many as memory leaves room for, by the arithmetic of `moetis fit`; cache_share counts for nothing
    then. memory_gb: what a rank may use of its device, in 10^9 bytes; if absent, all of a GPU, and as much as it takes
    on CPUs.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    expert_precision: Precision = Field(default=Precision.STORED, strict=False)
    cache_share: float = Field(default=0.4, gt=0, le=1)
    slots: Literal["auto"] | None = None
    prefetch: bool = True
    memory_gb: float | None = Field(default=None, gt=0)
    host_slab_rows: float = Field(default=2.0, ge=1)
    host_slab_gb: float | None = Field(default=None, gt=0)
    disk_path: Path | None = Field(default=None, strict=False)
    kv_page_size: int = Field(default=32, ge=4)
    kv_pages: int = Field(default=512, ge=2)
    kv_offload_gb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_batch_tokens: int = Field(default=256, ge=1)
    max_requests: int = Field(default=64, ge=1)
    threads: int = Field(default=1, ge=1)
    peer_timeout_s: float = Field(default=60.0, gt=0)
    meeting_timeout_s: float = Field(default=20.0, gt=0)
    host: str = "127.0.0.1"
    interface: str = "lo"


class FaultsConfig(_Strict):
    """heartbeat_s: how often each rank is asked for a sign of life. dead_after_s: one that gives none for so long is
    treated as dead, hung_after_s: and so is one that neither steps nor waits for the others. replace: a lost rank is
    replaced 'later' (the others serve meanwhile), the others 'wait' for the new one, or 'never' get one.
    """

    heartbeat_s: float = Field(default=1.0, gt=0)
    dead_after_s: float = Field(default=10.0, gt=0)
    hung_after_s: float = Field(default=30.0, gt=0)
    replace: Literal["later", "wait", "never"] = "later"


class RecorderConfig(_Strict):
    """rate: share of steps kept. max_mb: what each rank's segments may take on disk."""

    rate: float = Field(default=1.0, ge=0, le=1)
    ring_tokens: int = Field(default=65_536, ge=1)
    segment_tokens: int = Field(default=16_384, ge=1)
    max_mb: float = Field(default=256.0, gt=0)


class RebalanceConfig(_Strict):
    """min_gain: the share of other-node visits, on held-out requests, that a new plan must save to be enacted.

    window_tokens: a plan is made from about so many of the newest recorded tokens.
    max_mb_per_s: what each rank sends at most while experts move; null: no limit. checkpoint_gb_s: how fast a rank
    reads the checkpoint, which is then preferred to a peer behind a slower link; 0: only for experts that no rank has.
    """

    min_gain: float = Field(default=0.02, ge=0, lt=1)
    max_mb_per_s: float | None = Field(default=1000.0, gt=0)
    checkpoint_gb_s: float = Field(default=0.0, ge=0)
    seed: int = 0
    window_tokens: int = Field(default=200_000, ge=1)


class GatewayConfig(_Strict):
    """The OpenAI-compatible gateway of `serve --http`.

    model_name: what clients call the model; the model folder's name if absent. replicas: of the HTTP front end.
    api_keys_file: keys, one a line. api_keys_env: the name of an environment variable with keys, separated by commas.
    max_requests, max_tokens: what may be under way at once, tokens being prompts and what they may still add; beyond,
    clients get status 429. default_max_tokens: of a chat request that does not say. max_body_kb: of a request's JSON.
    """

    model_name: str | None = Field(default=None, min_length=1)
    replicas: int = Field(default=1, ge=1)
    api_keys_file: Path | None = Field(default=None, strict=False)
    api_keys_env: str | None = Field(default=None, min_length=1)
    max_requests: int = Field(default=256, ge=1)
    max_tokens: int = Field(default=1_000_000, ge=1)
    default_max_tokens: int = Field(default=1024, ge=1)
    max_body_kb: int = Field(default=1024, ge=1)


class ClusterConfig(_Strict):
    """One serving cluster. topology: a file or a shorthand like 2x2.

    What it starts with: the plan file `initial_plan`, else the placement that served last in this run_dir, else one
    planned from the trace `initial_trace`, else experts in id order.
    """

    name: str = "moetis"
    model: Path = Field(strict=False)
    topology: str
    slots_per_rank: int = Field(ge=1)
    run_dir: Path = Field(strict=False)
    initial_plan: Path | None = Field(default=None, strict=False)
    initial_trace: Path | None = Field(default=None, strict=False)
    ray: RayConfig = Field(default_factory=RayConfig)
    workers: WorkerConfig = Field(default_factory=WorkerConfig)
    recorder: RecorderConfig = Field(default_factory=RecorderConfig)
    rebalance: RebalanceConfig = Field(default_factory=RebalanceConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)

    @property
    def trace_dir(self) -> Path:
        return self.run_dir / "trace"

    def worker_options(self) -> WorkerOptions:
        workers, recorder = self.workers, self.recorder
        return WorkerOptions(
            model=self.model.absolute(),
            recorder=RecorderOptions(
                folder=self.trace_dir.absolute() if recorder.rate > 0 else None,
                rate=recorder.rate,
                ring_tokens=recorder.ring_tokens,
                segment_tokens=recorder.segment_tokens,
                max_bytes=int(recorder.max_mb * 1e6),
            ),
            migration_bytes_per_s=None if self.rebalance.max_mb_per_s is None else self.rebalance.max_mb_per_s * 1e6,
            memory_bytes=None if workers.memory_gb is None else workers.memory_gb * 1e9,
            **workers.model_dump(exclude={"host", "interface", "slots", "memory_gb"}),
        )


def history_path(config: ClusterConfig) -> Path:
    """Where the cluster's plans and decisions are kept."""
    return (config.run_dir / HISTORY_FILE).absolute()


def config_from_dict(raw: Any, *, source: str) -> ClusterConfig:
    """source names the file for errors. Raises ConfigError."""
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(error)}") from error


def load_config(path: str | Path) -> ClusterConfig:
    """Read a cluster's YAML; paths in it are relative to the working directory. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config '{path}': cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config '{path}': not text: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"config '{path}': not YAML: {' '.join(str(error).split())[:200]}") from error
    return config_from_dict(raw, source=f"config '{path}'")
