"""Which format a topology file has, and its reader."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from placement.errors import TopologyError
from placement.fabric.hosts import Inside, Reading
from placement.fabric.ibnet import read_ibnetdiscover
from placement.fabric.labels import nodes_of_mapping, read_labels
from placement.fabric.nccl import read_nccl_inside, read_nccl_xml
from placement.fabric.slurm import read_slurm_conf, read_slurm_yaml
from placement.topology import load_topology, topology_from_dict

MOST_BYTES = 256 * 2**20
_SHORTHAND = re.compile(r"\d+(x\d+)*")


class Format(StrEnum):
    MOETIS = "moetis"
    NCCL = "nccl"
    SLURM = "slurm"
    IBNETDISCOVER = "ibnetdiscover"
    LABELS = "labels"


def read_topology(
    where: str,
    *,
    form: Format | None = None,
    inside: Inside | None = None,
    keys: Sequence[str] = (),
    pick: str | None = None,
) -> Reading:
    """A topology from a file of any known format, or from a shorthand such as 4x8.

    form: the format; told by the content unless given. inside, keys, pick: see the readers. Raises TopologyError.
    """
    if _SHORTHAND.fullmatch(where):
        return Reading(topology=load_topology(where))
    text = read_text(where)
    return parse_topology(text, source=where, form=form, inside=inside, keys=keys, pick=pick)


def parse_topology(
    text: str,
    *,
    source: str,
    form: Format | None = None,
    inside: Inside | None = None,
    keys: Sequence[str] = (),
    pick: str | None = None,
) -> Reading:
    """As `read_topology`, from the file's text; source names it for errors."""
    head = text.lstrip()[:4096]
    if form is Format.NCCL or (form is None and head.startswith("<")):
        return read_nccl_xml(text, source=source)
    if form is Format.IBNETDISCOVER or (form is None and _is_ibnetdiscover(text)):
        return read_ibnetdiscover(text, source=source, inside=inside)
    if form is None and re.search(r"(?im)^\s*(SwitchName|BlockName|BlockSizes)\s*=", text):
        form = Format.SLURM
    if form is Format.SLURM and re.search(r"(?im)^\s*(SwitchName|BlockName)\s*=", text):
        return read_slurm_conf(text, source=source, inside=inside)
    raw = _mapping(text, source)
    if form is Format.SLURM or (form is None and isinstance(raw, list)):
        return read_slurm_yaml(raw, source=source, inside=inside, pick=pick)
    if form is Format.MOETIS or (form is None and isinstance(raw, dict) and "levels" in raw):
        return Reading(topology=topology_from_dict(raw, source=source))
    return read_labels(nodes_of_mapping(raw, source=source), source=source, inside=inside, keys=keys)


def read_inside(where: str) -> Inside:
    """What a NCCL topology file says of one node. Raises TopologyError."""
    return read_nccl_inside(read_text(where), source=where)


def read_text(where: str) -> str:
    """Raises TopologyError where the file is absent, not text, or larger than a topology can be."""
    path = Path(where)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise TopologyError(f"topology '{where}': larger than {MOST_BYTES >> 20} MiB, which no topology is")
        return path.read_text()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"topology '{where}': cannot be read: {error}") from error


def _is_ibnetdiscover(text: str) -> bool:
    return re.search(r'(?m)^(switchguid=|caguid=|(Switch|Ca)\s+\d+\s+")', text) is not None


def _mapping(text: str, source: str) -> Any:
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise TopologyError(
            f"{source}: no format that is known (NCCL XML, Slurm, ibnetdiscover, Kubernetes labels, Moetis YAML), "
            f"and not YAML: {' '.join(str(error).split())[:160]}"
        ) from error
