"""Topology: the tree that the ranks hang from, and what its links cost.

Levels are listed from the outermost groups down to the GPU. `groups[i, r]` is the group of level i that rank r lies in;
groups are numbered in rank order and nest. A level's link joins one of its groups to the siblings beside it: the
node level's link is the node's NIC, the GPU level's link is the GPU's port on NVLink or PCIe.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placement.errors import TopologyError

NODE = "node"
MAX_RANKS = 1_000_000
LEVEL_NAMES = {2: (NODE, "gpu"), 3: ("switch", NODE, "gpu"), 4: ("switch", NODE, "numa", "gpu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """bandwidth in bytes/s and latency in seconds of one group's way to its siblings."""

    bandwidth: float
    latency_s: float


DEFAULT_LINKS = {
    "switch": Link(bandwidth=45e9, latency_s=20e-6),
    NODE: Link(bandwidth=45e9, latency_s=15e-6),
    "numa": Link(bandwidth=150e9, latency_s=8e-6),
    "gpu": Link(bandwidth=150e9, latency_s=8e-6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU and its node: memory in bytes, bandwidths in bytes/s, peak in flop/s."""

    gpu_memory: float = 80e9
    hbm_bandwidth: float = 3.3e12
    host_link_bandwidth: float = 55e9
    peak_flops: float = 8e14
    host_memory_per_node: float = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A tree of ranks. groups: int32 [levels, R]; the last level is the GPU, one rank each.

    node_names: what the nodes are called, in order, or empty.
    """

    name: str
    levels: tuple[str, ...]
    groups: NDArray[np.int32]
    links: tuple[Link, ...]
    device: Device = Device()
    node_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        groups = np.array(self.groups, np.int32, ndmin=2)
        groups.setflags(write=False)
        object.__setattr__(self, "groups", groups)
        if NODE not in self.levels or len(self.levels) != len(groups) or len(self.links) != len(groups):
            raise TopologyError(f"topology '{self.name}': levels {self.levels} must include 'node' and match the tree")
        if groups.shape[1] == 0 or not np.array_equal(groups[-1], np.arange(groups.shape[1])):
            raise TopologyError(f"topology '{self.name}': the last level must list ranks 0, 1, 2, ... in order")
        for outer, inner in pairwise(groups):
            if any(len(np.unique(outer[inner == group])) > 1 for group in np.unique(inner)):
                raise TopologyError(f"topology '{self.name}': a group lies in two groups of the level above it")
        if (np.diff(groups, axis=1) < 0).any() or (np.diff(groups, axis=1) > 1).any() or groups[:, 0].any():
            raise TopologyError(f"topology '{self.name}': groups must be numbered 0, 1, 2, ... in rank order")
        if self.node_names and len(set(self.node_names)) != self.num_nodes:
            raise TopologyError(
                f"topology '{self.name}': key 'node_names' must name each of {self.num_nodes} nodes once, got "
                f"{len(set(self.node_names))} names"
            )

    @property
    def num_ranks(self) -> int:
        return int(self.groups.shape[1])

    @property
    def node_level(self) -> int:
        return self.levels.index(NODE)

    @property
    def num_nodes(self) -> int:
        return int(self.groups[self.node_level, -1]) + 1

    def node_of_rank(self) -> NDArray[np.int32]:
        """[R]: the node of each rank."""
        nodes: NDArray[np.int32] = self.groups[self.node_level]
        return nodes

    def to_dict(self) -> dict[str, Any]:
        """The form that `from_dict` reads and that plan files and YAML use."""
        named = {"node_names": list(self.node_names)} if self.node_names else {}
        return named | {
            "name": self.name,
            "levels": [
                {"name": name, "bandwidth_gb_s": link.bandwidth / 1e9, "latency_us": round(link.latency_s * 1e6, 9)}
                for name, link in zip(self.levels, self.links, strict=True)
            ],
            "tree": _nested(self.groups, 0, np.arange(self.num_ranks)),
            "device": {
                "gpu_memory_gb": self.device.gpu_memory / 1e9,
                "hbm_gb_s": self.device.hbm_bandwidth / 1e9,
                "host_link_gb_s": self.device.host_link_bandwidth / 1e9,
                "peak_tflops": self.device.peak_flops / 1e12,
                "host_memory_gb_per_node": self.device.host_memory_per_node / 1e9,
            },
        }


def _nested(groups: NDArray[np.int32], level: int, ranks: NDArray[np.intp]) -> list[Any]:
    if level == len(groups) - 1:
        return [int(rank) for rank in ranks]
    inside = groups[level, ranks]
    return [_nested(groups, level + 1, ranks[inside == group]) for group in np.unique(inside)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _LevelModel(_Strict):
    name: str
    bandwidth_gb_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    latency_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class _DeviceModel(_Strict):
    gpu_memory_gb: float = Field(default=80, gt=0, allow_inf_nan=False)
    hbm_gb_s: float = Field(default=3300, gt=0, allow_inf_nan=False)
    host_link_gb_s: float = Field(default=55, gt=0, allow_inf_nan=False)
    peak_tflops: float = Field(default=800, gt=0, allow_inf_nan=False)
    host_memory_gb_per_node: float = Field(default=1000, gt=0, allow_inf_nan=False)

    def device(self) -> Device:
        return Device(
            gpu_memory=self.gpu_memory_gb * 1e9,
            hbm_bandwidth=self.hbm_gb_s * 1e9,
            host_link_bandwidth=self.host_link_gb_s * 1e9,
            peak_flops=self.peak_tflops * 1e12,
            host_memory_per_node=self.host_memory_gb_per_node * 1e9,
        )


class _TopologyModel(_Strict):
    name: str
    levels: list[_LevelModel] = Field(min_length=1)
    tree: list[Any] | None = None
    fanout: list[int] | None = None
    device: _DeviceModel = Field(default_factory=_DeviceModel)
    node_names: list[str] = Field(default_factory=list)


def topology_from_dict(raw: Any, *, source: str = "topology") -> Topology:
    """Build a topology from a mapping with `name`, `levels` and either `fanout` or a nested `tree` of ranks.

    source names the file or key for error messages. Raises TopologyError.
    """
    try:
        model = _TopologyModel.model_validate(raw)
    except ValidationError as error:
        raise TopologyError(f"{source}: {first_problem(error)}") from error
    names = tuple(level.name for level in model.levels)
    if (model.tree is None) == (model.fanout is None):
        raise TopologyError(
            f"{source}: give exactly one of 'tree' (nested lists of ranks) and 'fanout' (one number a level)"
        )
    if model.fanout is not None:
        groups = _groups_of_fanout(model.fanout, len(names), source)
    else:
        groups = _groups_of_tree(model.tree, len(names), source)
    links = tuple(_link(level) for level in model.levels)
    return Topology(
        name=model.name,
        levels=names,
        groups=groups,
        links=links,
        device=model.device.device(),
        node_names=tuple(model.node_names),
    )


def _link(level: _LevelModel) -> Link:
    default = DEFAULT_LINKS.get(level.name, DEFAULT_LINKS[NODE])
    return Link(
        bandwidth=default.bandwidth if level.bandwidth_gb_s is None else level.bandwidth_gb_s * 1e9,
        latency_s=default.latency_s if level.latency_us is None else level.latency_us / 1e6,
    )


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, as `key: what (got value)`."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole file"
    return f"key '{key}': {problem['msg']} (got {str(problem['input'])[:80]!r})"


def _groups_of_fanout(fanout: list[int], num_levels: int, source: str) -> NDArray[np.int32]:
    if len(fanout) != num_levels or min(fanout) < 1:
        raise TopologyError(f"{source}: key 'fanout': needs {num_levels} numbers from 1 up, one a level, got {fanout}")
    num_ranks = math.prod(fanout)
    if num_ranks > MAX_RANKS:
        raise TopologyError(
            f"{source}: key 'fanout': {fanout} makes {num_ranks} ranks; at most {MAX_RANKS} are supported"
        )
    sizes = [math.prod(fanout[level + 1 :]) for level in range(num_levels)]
    return np.stack([np.arange(num_ranks) // size for size in sizes]).astype(np.int32)


def _groups_of_tree(tree: Any, num_levels: int, source: str) -> NDArray[np.int32]:
    columns: list[list[int]] = []
    counters = [-1] * (num_levels - 1)

    def walk(children: Any, level: int, path: list[int]) -> None:
        if not isinstance(children, list) or not children:
            raise TopologyError(f"{source}: key 'tree': needs {num_levels} levels of non-empty lists, got {children!r}")
        for child in children:
            if level == num_levels - 1:
                if not isinstance(child, int) or isinstance(child, bool) or child != len(columns):
                    raise TopologyError(f"{source}: key 'tree': expected rank {len(columns)}, got {child!r}")
                columns.append([*path, child])
            else:
                counters[level] += 1
                walk(child, level + 1, [*path, counters[level]])

    walk(tree, 0, [])
    return np.array(columns, np.int32).T


def load_topology(text: str) -> Topology:
    """A topology from a YAML file, or from a shorthand: `4x2` (nodes x GPUs), `2x4x8` (switches x nodes x GPUs)."""
    if re.fullmatch(r"\d+(x\d+)*", text):
        fanout = [int(part) for part in text.split("x")]
        if len(fanout) not in LEVEL_NAMES or min(fanout) < 1:
            raise TopologyError(
                f"topology '{text}': write NODESxGPUS, SWITCHESxNODESxGPUS or SWITCHESxNODESxNUMAxGPUS, each from 1 up"
            )
        return topology_from_dict(
            {"name": text, "levels": [{"name": name} for name in LEVEL_NAMES[len(fanout)]], "fanout": fanout},
            source=text,
        )
    path = Path(text)
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise TopologyError(f"topology '{text}': no such file, and not a shorthand like 4x2") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise TopologyError(
            f"topology '{text}': cannot be read as YAML: {' '.join(str(error).split())[:200]}"
        ) from error
    return topology_from_dict(raw, source=text)
