"""The fused kernels against plain torch, over slot ids: on the GPU, or in Triton's interpreter where Triton is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, OlmoeConfig

from placement.fit.precision import Precision
from tests.workers.test_model_seam import CONFIGS
from workers.blob import BlobLayout, layout_of
from workers.few_tokens import fit_words, is_plain_gated, most_pairs, words_of
from workers.seam import SlotExperts, experts_modules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, TOKENS, TOP_K = 9, 3, 2


def reference(
    tensors: dict[str, torch.Tensor], hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """down(silu(gate) * up), weighted and summed, pair by pair. tensors: [S, ...] of all slots."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for token, (of_token, shares) in enumerate(zip(slots.tolist(), weights, strict=True)):
        for slot, share in zip(of_token, shares, strict=True):
            if slot >= 0:
                gate, up = (tensors["gate_up_proj"][slot] @ hidden[token]).chunk(2)
                out[token] += share * (tensors["down_proj"][slot] @ (functional.silu(gate) * up)).float()
    return out


def _example(precision: Precision, dtype: torch.dtype) -> tuple[BlobLayout, torch.Tensor, torch.Tensor]:
    """A layout, slots full of experts, and hidden states. Width 24, so that no block of the kernels is full."""
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"], dtype=dtype)
    layout = layout_of(experts_modules(model)[0], 6, precision)
    generator = torch.Generator().manual_seed(0)
    slots = torch.zeros((SLOTS, layout.num_bytes), dtype=torch.uint8)
    for slot in slots:
        for field in layout.fields:
            field.write(torch.randn(field.shape, generator=generator).to(dtype) * 0.3, slot)
    return layout, slots.to(DEVICE), torch.randn((TOKENS, 32), generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", Precision)
def test_the_fused_kernels_give_what_plain_torch_gives(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from workers.fused_kernel import FusedExperts

    layout, slots, hidden = _example(precision, dtype)
    # Of three experts one lies in no slot; the third token's experts are elsewhere, or in none.
    table = torch.tensor([7, 0, 3, -1], device=DEVICE)
    chosen = torch.tensor([[0, 1], [-1, 2], [-1, 3]], device=DEVICE)
    weights = torch.tensor([[0.3, 0.7], [1.0, 0.5], [0.2, 0.2]], device=DEVICE)
    placed = torch.where(chosen < 0, -1, table[chosen])
    expected = reference(layout.read(slots), hidden, placed, weights)
    found = FusedExperts(layout, slots)(hidden, chosen, table, weights, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert found[2].eq(0).all()


def test_the_fused_kernels_give_the_same_again_however_their_arguments_lie_in_memory() -> None:
    pytest.importorskip("triton")
    from workers.fused_kernel import FusedExperts

    layout, slots, hidden = _example(Precision.STORED, torch.float32)
    fused = FusedExperts(layout, slots)
    table = torch.tensor([7, 0, 3, -1, 5], device=DEVICE)
    ids = torch.tensor([-1, 0, 1, -1, 2, -1, 3], device=DEVICE)
    weights = torch.rand((TOKENS, TOP_K), device=DEVICE)
    for chosen in (ids[1:].view(TOKENS, TOP_K), ids[1:].view(TOKENS, TOP_K).clone()):
        expected = reference(layout.read(slots), hidden, torch.where(chosen < 0, -1, table[chosen]), weights)
        for _ in range(3):
            found = fused(hidden, chosen, table, weights, torch.float32)
            assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("num_pairs", [1, 3, 4, 5, 15, 16])
def test_slots_that_the_launch_carries_are_read_as_those_of_a_table(num_pairs: int) -> None:
    pytest.importorskip("triton")
    from workers.fused_kernel import FusedExperts

    layout, slots, hidden = _example(Precision.STORED, torch.float32)
    fused = FusedExperts(layout, slots)
    generator = torch.Generator().manual_seed(num_pairs)
    for _ in range(3):
        chosen = torch.randint(-1, SLOTS, (1, num_pairs), generator=generator)
        table = torch.cat([torch.randperm(SLOTS, generator=generator), torch.tensor([-1])])
        weights = torch.rand((1, num_pairs), generator=generator).to(DEVICE)
        words = words_of(table[chosen[0]].numpy())
        given = fused(hidden[:1], chosen.to(DEVICE), words, weights, torch.float32)
        assert torch.equal(given, fused(hidden[:1], chosen.to(DEVICE), table.to(DEVICE), weights, torch.float32))


def test_words_hold_the_highest_slot_of_as_many_pairs_as_fit() -> None:
    slots = np.array([-1, 0, 1, 65534] * 4)
    assert fit_words(len(slots), 65535) and not fit_words(17, 10) and not fit_words(1, 65536)
    read = [(word >> 16 * place & 0xFFFF) - 1 for word in words_of(slots) for place in range(4)]
    assert read == slots.tolist()
    assert words_of(slots[:3])[1:] == (0, 0, 0)


def test_the_reference_is_what_transformers_computes() -> None:
    layout, slots, hidden = _example(Precision.STORED, torch.float32)
    module = experts_modules(AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"], dtype=torch.float32))[0].to(DEVICE)
    chosen = torch.tensor([[7, 0], [2, 3], [8, 8]], device=DEVICE)
    weights = torch.rand((TOKENS, TOP_K), device=DEVICE)
    whole = SlotExperts(module, layout.views(slots)).weighted(hidden, chosen, weights)
    assert torch.allclose(reference(layout.views(slots), hidden, chosen, weights), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fits"), [("mixtral", True), ("qwen3_moe", True), ("olmoe", True), ("gpt_oss", False)]
)
def test_experts_with_biases_or_gates_of_their_own_are_left_to_transformers(name: str, fits: bool) -> None:
    module = experts_modules(AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32))[0]
    assert is_plain_gated(module, layout_of(module, 6)) is fits


@pytest.mark.parametrize(
    ("num_experts", "hidden", "intermediate", "precision", "pays", "does_not"),
    [
        (64, 2048, 1024, Precision.STORED, 128, 129),
        (8, 4096, 14336, Precision.STORED, 16, 64),
        (64, 2048, 1024, Precision.INT8, 1024, 1025),
        (8, 4096, 14336, Precision.INT8, 16, 128),
    ],
)
def test_experts_of_few_tokens_are_fused_as_long_as_that_was_measured_to_be_faster(
    num_experts: int, hidden: int, intermediate: int, precision: Precision, pays: int, does_not: int
) -> None:
    config = OlmoeConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=num_experts,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        eos_token_id=None,
    )
    with torch.device("meta"):
        module = experts_modules(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))[0]
    layout = layout_of(module, num_experts, precision)
    assert pays <= most_pairs(layout, num_experts) < does_not
