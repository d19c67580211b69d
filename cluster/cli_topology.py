"""`moetis topology`: probe, show and convert. The last two start without Ray."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_offline import JsonOption
from cluster.terminal import LOG, OUT, show_result, working
from placement.errors import ConfigError

if TYPE_CHECKING:
    from placement.fabric.hosts import Inside, Reading

topology_commands = typer.Typer(
    no_args_is_help=True, help="Find out how the GPUs are wired, and keep it as a topology file."
)


class FormatName(StrEnum):
    MOETIS = "moetis"
    NCCL = "nccl"
    SLURM = "slurm"
    IBNETDISCOVER = "ibnetdiscover"
    LABELS = "labels"


SourceArgument = Annotated[str, typer.Argument(metavar="FILE|NxG", help="A topology in any known format, or as 4x8.")]
FormatOption = Annotated[
    FormatName | None, typer.Option("--format", help="The file's format (told by its content unless given).")
]
GpusOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="GPUs (ranks) of each node, where the file does not say.")
]
HostOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="One node's NCCL topology XML: the inside of every node is taken from it."),
]
LabelOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Group nodes by this label; several times, outermost first.")
]
PickOption = Annotated[str | None, typer.Option(metavar="NAME", help="Which topology of a Slurm topology.yaml.")]
OutOption = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the topology there, as YAML.")]


@topology_commands.command()
def show(
    source: SourceArgument,
    form: FormatOption = None,
    gpus_per_node: GpusOption = None,
    host: HostOption = None,
    label: LabelOption = None,
    pick: PickOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Draw every group, however many there are.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw a topology as a tree, with the bandwidth and latency of each level.

    [dim]moetis topology show 4x8[/dim]
    [dim]moetis topology show /etc/slurm/topology.conf --gpus-per-node 8[/dim]
    """
    from cluster.topology_view import topology_tree

    reading = _read(source, form, gpus_per_node, host, label, pick)
    _tell(reading)
    show_result(as_json, reading.topology.to_dict(), lambda: OUT.print(topology_tree(reading.topology, everything)))


@topology_commands.command()
def convert(
    source: SourceArgument,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Where to write the topology, as YAML.")],
    form: FormatOption = None,
    gpus_per_node: GpusOption = None,
    host: HostOption = None,
    label: LabelOption = None,
    pick: PickOption = None,
) -> None:
    """Make Moetis's own topology file from Slurm's, NCCL's, ibnetdiscover's or Kubernetes' (labels).

    What the source does not say, such as latencies, is filled with defaults and named; correct it in the file.

    [dim]kubectl get nodes -o json > nodes.json; moetis topology convert nodes.json --out topology.yaml[/dim]
    [dim]moetis topology convert topology.conf --host nccl.xml --out topology.yaml[/dim]
    """
    reading = _read(source, form, gpus_per_node, host, label, pick)
    _tell(reading)
    _write(reading, out)


@topology_commands.command()
def probe(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Probe all nodes of the cluster that serves with this file.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Probe all nodes of this Ray cluster.")
    ] = None,
    gpus_per_node: GpusOption = None,
    label: LabelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out how this host, or every node of a Ray cluster, is wired: NVML, NUMA, InfiniBand, node labels.

    Reads only. On machines without GPUs, --gpus-per-node lays out that many ranks on each node.

    [dim]moetis topology probe --out topology.yaml[/dim]
    [dim]moetis topology probe --address auto --label rack --out topology.yaml[/dim]
    """
    from cluster import probing
    from cluster.topology_view import topology_tree

    if config is not None and address is not None:
        raise ConfigError("give --config or --address, not both")
    inside = _inside(gpus_per_node, None)
    with working("probing"):
        if config is not None or address is not None:
            reading = probing.probe_cluster(config=config, address=address, inside=inside, keys=label or [])
        else:
            reading = probing.probe_this_host(inside)
    _tell(reading)
    if out is not None:
        _write(reading, out)
    show_result(as_json, reading.topology.to_dict(), lambda: OUT.print(topology_tree(reading.topology, False)))


def _read(
    source: str,
    form: FormatName | None,
    gpus_per_node: int | None,
    host: str | None,
    label: list[str] | None,
    pick: str | None,
) -> Reading:
    from placement.fabric.reading import Format, read_topology

    named = None if form is None else Format(str(form))
    return read_topology(source, form=named, inside=_inside(gpus_per_node, host), keys=label or (), pick=pick)


def _inside(gpus_per_node: int | None, host: str | None) -> Inside | None:
    from placement.fabric.hosts import gpus
    from placement.fabric.reading import read_inside

    if gpus_per_node is not None and host is not None:
        raise ConfigError("give --gpus-per-node or --host, not both: each says what a node has inside")
    if host is not None:
        return read_inside(host)
    return None if gpus_per_node is None else gpus(gpus_per_node)


def _tell(reading: Reading) -> None:
    for note in reading.notes:
        LOG.print(f"note: {note}", markup=False, soft_wrap=True)


def _write(reading: Reading, out: str) -> None:
    import yaml

    from cluster.offline import output_path, write_result

    path: Path = output_path(out)
    write_result(path, yaml.safe_dump(reading.topology.to_dict(), sort_keys=False, default_flow_style=None).encode())
    LOG.print(f"wrote {path}")
