"""What `moetis export` does: a plan file to an engine's file, with its layers numbered as the engine numbers them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from placement.core import EMPTY, Placement
from placement.errors import ConfigError
from placement.interchange.export import Engine, check_ranks, export_placement
from placement.layers import ModelLayers, all_moe, layers_from_dict, layers_from_text
from placement.planfile import Plan, load_plan

USE = {
    Engine.SGLANG: "start SGLang with: --init-expert-location {out} --ep-num-redundant-experts SPARE",
    Engine.VLLM: "vLLM takes no placement from a file: {out} is what its EPLB policy would return (see docs/vllm.md)",
    Engine.ASCEND: "start vLLM Ascend with expert_map_path: {out}",
    Engine.TENSORRT: "start TensorRT-LLM with moe_config: {{load_balancer: {out}}} in its YAML",
    Engine.EPLB: "numpy.load('{out}') has phy2log, log2phy and logcnt, as EPLB's rebalance_experts returns them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """data: the file. use: what to do with it ({out} stands for its name). assumed: what a person should check."""

    data: bytes
    use: str
    assumed: list[str]
    figures: dict[str, Any]


def export_plan(
    text: str, engine: Engine, *, moe_layers: str | None, hidden_layers: int | None, ep_size: int | None
) -> Exported:
    """Raises PlacementError or ConfigError where plan, layers and ranks do not fit each other."""
    plan = load_plan(text)
    check_ranks(plan.placement, plan.placement.num_ranks if ep_size is None else ep_size)
    placement, known, assumed = _moe_rows(plan, text)
    layers, more = _layers(placement, known, moe_layers, hidden_layers)
    assumed += more
    empty = int((placement.physical_to_logical == EMPTY).sum())
    if empty and engine is not Engine.VLLM:
        assumed.append(f"{empty} empty slots hold one more copy of an expert that has fewest")
    if (placement.rank_weights != placement.rank_weights[:, :1]).any():
        assumed.append("the engine shares an expert's tokens by its own rule; the plan's weights of ranks are lost")
    figures = {
        "layers": layers.to_dict(),
        "experts": placement.num_experts,
        "slots": placement.num_slots,
        "redundant_experts": placement.num_slots - placement.num_experts,
        "ep_size": placement.num_ranks,
    }
    return Exported(
        data=export_placement(placement, layers, engine),
        use=USE[engine].replace("SPARE", str(figures["redundant_experts"])),
        assumed=assumed if engine is not Engine.EPLB else [],
        figures=figures,
    )


def _moe_rows(plan: Plan, text: str) -> tuple[Placement, ModelLayers | None, list[str]]:
    """The placement's MoE layers alone, and what the plan says of them: a plan from counts has a row for dense ones."""
    placement = plan.placement
    if "layers" not in plan.measured:
        return placement, None, []
    known = layers_from_dict(plan.measured["layers"], source=f"plan '{text}'")
    if len(known.moe) == placement.num_layers or known.num_hidden != placement.num_layers:
        return placement, known, []
    rows = list(known.moe)
    chosen = replace(
        placement,
        physical_to_logical=placement.physical_to_logical[rows],
        tiers=placement.tiers[rows],
        rank_weights=placement.rank_weights[rows],
    )
    return chosen, known, [f"layers without any load are dense: {', '.join(str(one) for one in known.dense)}"]


def _layers(
    placement: Placement, known: ModelLayers | None, moe: str | None, hidden: int | None
) -> tuple[ModelLayers, list[str]]:
    """The options first, then what the plan's source said, else: all layers are MoE layers, which is said."""
    if moe is not None:
        indices = layers_from_text(moe, option="--moe-layers")
        if len(indices) != placement.num_layers:
            raise ConfigError(f"--moe-layers '{moe}': names {len(indices)} layers, the plan has {placement.num_layers}")
    else:
        indices = known.moe if known is not None else tuple(range(placement.num_layers))
    num_hidden = hidden or (known.num_hidden if known is not None else 0)
    if hidden is not None and indices[-1] >= hidden:
        raise ConfigError(
            f"--hidden-layers {hidden}: the plan has MoE layer {indices[-1]}; give {indices[-1] + 1} or more"
        )
    layers = ModelLayers(moe=indices, num_hidden=max(num_hidden, indices[-1] + 1))
    if known is None and moe is None and hidden is None:
        return all_moe(placement.num_layers), [
            f"all {placement.num_layers} layers are MoE layers (the plan does not say; "
            f"--moe-layers 3-60 --hidden-layers 61 says it otherwise)"
        ]
    return layers, []
