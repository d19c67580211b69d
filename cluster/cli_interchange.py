"""`moetis import` and `moetis export`: from what an engine recorded, to what an engine takes. No Ray."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cluster.terminal import LOG, OUT, show_result, working

interchange_commands = typer.Typer()


class To(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    ASCEND = "ascend"
    TENSORRT_LLM = "tensorrt-llm"
    EPLB = "eplb"


ExpertsOption = Annotated[
    int | None, typer.Option("--experts", metavar="N", min=1, help="Experts of a layer, where the source lacks it.")
]
FormatOption = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="What the source is, where it is not recognised.")
]


@interchange_commands.command("import")
def import_source(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file or folder that an engine recorded.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="A new or empty folder for the trace.")],
    sample: Annotated[
        str, typer.Option(metavar="PERCENT", help="Keep so many of the requests, such as 10%, each whole.")
    ] = "100%",
    experts: ExpertsOption = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token chooses, where it is not seen.")] = None,
    moe_layers: Annotated[
        str | None, typer.Option(metavar="LAYERS", help="Which layers are MoE layers, such as 3-60.")
    ] = None,
    counts_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Read as counts: this key of the file.")
    ] = None,
    form: FormatOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Turn what SGLang, vLLM, TensorRT-LLM or Megatron recorded into a trace folder, whatever its size.

    The format is found out from the files: SGLang's expert distribution dumps (.pt), vLLM's routed experts (.npy, or
    API responses in JSON lines), TensorRT-LLM's statistics, Megatron's router traces, .npz, and counts (.npz, .npy,
    .json, .csv). Says what was dropped and why, and what the source cannot give. `plan`, `evaluate` and the others
    take such files directly, too.

    [dim]moetis import dumps/ --out trace/ --sample 10%[/dim]
    """
    from cluster import importing, views_interchange
    from placement.interchange.pieces import Hints
    from placement.layers import layers_from_text

    hints = Hints(
        num_experts=experts,
        top_k=top_k,
        moe_layers=layers_from_text(moe_layers, option="--moe-layers") if moe_layers is not None else None,
        sample=importing.sampled_share(sample),
        counts_key=counts_key,
        form=form,
    )
    result = importing.import_source(source, out, hints)
    show_result(as_json, result, lambda: OUT.print(views_interchange.import_table(result)))


@interchange_commands.command()
def export(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `moetis plan` writes it.")],
    to: Annotated[To, typer.Option("--to", help="The engine that is to take it.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Where to write the result.")],
    moe_layers: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="The plan's layers in the model, such as 3-60, where the plan lacks it."),
    ] = None,
    hidden_layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="All layers of the model, where the plan lacks it.")
    ] = None,
    ep_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of the engine; refused unless the plan fits them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Write a plan in the form that an engine takes, and say how to start the engine with it.

    Dense layers are filled, and slots are checked against the engine's ranks before anything is written.

    [dim]moetis export plan.json --to sglang --out experts.json[/dim]
    """
    from cluster import exporting, offline
    from placement.interchange.export import Engine, check_suffix

    engine = Engine(str(to))
    check_suffix(out, engine)
    path = offline.output_path(out)
    with working("writing"):
        result = exporting.export_plan(
            plan, engine, moe_layers=moe_layers, hidden_layers=hidden_layers, ep_size=ep_size
        )
        offline.write_result(path, result.data)
    LOG.print(f"wrote {path}", markup=False, soft_wrap=True)
    for line in result.assumed:
        LOG.print(f"assumed: {line}", markup=False, soft_wrap=True)
    figures = {"out": str(path), "to": str(engine), **result.figures, "use": result.use.format(out=path)}
    show_result(as_json, figures, lambda: OUT.print(figures["use"], markup=False, soft_wrap=True))
