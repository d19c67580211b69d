"""Quantised experts: what lies in a blob, how far it is from the weights, and that `fit` counts the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.core import ExpertId
from placement.errors import ConfigError
from placement.fit.checkpoint import read_checkpoint
from placement.fit.precision import Precision
from placement.fit.sizing import expert_sizes
from scripts.bench.precision import compare
from workers.blob import BlobField
from workers.loading import load_share
from workers.options import RecorderOptions, WorkerOptions
from workers.precision import LARGEST, dequantise, quantise

DEMO = Path(__file__).parents[2] / "configs" / "models" / "demo"
OPTIONS = WorkerOptions(model=DEMO, recorder=RecorderOptions(folder=None), dtype="bfloat16")
QUANTISED = [Precision.INT8, Precision.INT4]


def _back(weights: torch.Tensor, precision: Precision, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    payload, scales = quantise(weights, precision)
    return dequantise(payload[None], scales[None], precision, inputs=weights.shape[1], dtype=dtype)[0]


def test_int8_is_a_byte_a_weight_and_its_scale_a_channel() -> None:
    payload, scales = quantise(torch.tensor([[127.0, -1.0, 0.0], [0.5, -127.0, 63.5]]), Precision.INT8)
    assert payload.tolist() == [[127, -1, 0], [0, -127, 64]]
    assert scales.tolist() == [[1.0], [1.0]]


def test_int4_has_the_even_input_in_the_low_half() -> None:
    payload, scales = quantise(torch.tensor([[7.0, -7.0, 1.0]]), Precision.INT4)
    assert payload.tolist() == [[(1 << 4) | 15, 9]]
    assert scales.tolist() == [[1.0]]


@settings(max_examples=80, deadline=None)
@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 150),
    precision=st.sampled_from(QUANTISED),
    size=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
)
def test_no_weight_is_further_off_than_half_a_step(
    outputs: int, inputs: int, precision: Precision, size: float, seed: int
) -> None:
    weights = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(seed)) * size
    _, scales = quantise(weights, precision)
    group = inputs if precision is Precision.INT8 else 64
    steps = scales.float().repeat_interleave(group, dim=1)[:, :inputs]
    assert ((_back(weights, precision) - weights).abs() <= 0.5001 * steps).all()
    assert (scales.float().squeeze() * LARGEST[precision] <= 1.01 * weights.abs().amax()).all()


@pytest.mark.parametrize("precision", QUANTISED)
def test_weights_that_are_all_zero_stay_zero(precision: Precision) -> None:
    assert _back(torch.zeros(3, 70), precision).eq(0).all()


@pytest.mark.parametrize("precision", QUANTISED)
def test_weights_that_are_not_finite_are_refused_by_name(precision: Precision) -> None:
    field = BlobField(name="down_proj", shape=(2, 4), dtype=torch.float32, offset=0, precision=precision)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, float("inf"), 0.0, 0.0]])
    with pytest.raises(ConfigError, match="expert tensor 'down_proj' holds weights that are not finite"):
        field.write(weights, torch.zeros(field.num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("precision", Precision)
def test_fit_counts_the_bytes_that_a_worker_keeps(precision: Precision) -> None:
    _, experts = load_share(replace(OPTIONS, expert_precision=precision), torch.device("cpu"))
    assert experts.layout.num_bytes == expert_sizes(read_checkpoint(DEMO))[precision]


@pytest.mark.parametrize("precision", QUANTISED)
def test_an_expert_gives_the_same_bytes_whenever_it_is_read(precision: Precision) -> None:
    _, experts = load_share(replace(OPTIONS, expert_precision=precision), torch.device("cpu"))
    once, again = (torch.zeros(experts.layout.num_bytes, dtype=torch.uint8) for _ in range(2))
    experts.read(ExpertId(3, 5), once)
    experts.read(ExpertId(3, 5), again.fill_(255))
    for field in experts.layout.fields:
        for one, other in zip(field.quantised(once[None]), field.quantised(again[None]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.long
def test_int8_hardly_changes_what_the_demo_model_says_and_int4_little() -> None:
    rows = {row.precision: row for row in compare(DEMO, num_prompts=4, num_tokens=16)}
    assert rows["stored"].logits_error == 0
    assert rows["int8"].logits_error < 0.03
    assert rows["int8"].tokens_differ < 0.02
    assert rows["int4"].logits_error < 0.2
    assert rows["int8"].blob_bytes < 0.53 * rows["stored"].blob_bytes
    assert rows["int4"].blob_bytes < 0.29 * rows["stored"].blob_bytes
