from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cache import numbers_of, shares_of
from placement.errors import ConfigError
from tests.cluster.running_cli import moetis, write_trace


def test_cache_scores_every_policy_beside_belady(tmp_path: Path) -> None:
    done = moetis("cache", str(write_trace(tmp_path / "t.npz")), "--slots", "50%", "--batch", "1,2", "--json")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)["scores"]
    assert [(score["batch"], score["num_slots"]) for score in scores] == [(1, 8), (2, 8)]
    assert all(0 < score["of_belady"]["reuse"] <= 1 for score in scores)


@pytest.mark.parametrize("text", ["", "0%", "101%", "ten", "10%,,20%"])
def test_a_share_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--slots"):
        shares_of(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1,x"])
def test_a_batch_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        numbers_of(text, "--batch")


def test_fit_tells_slots_by_precision_and_refuses_what_cannot_fit() -> None:
    model = "configs/models/demo"
    done = moetis("fit", model, "--gpu-memory", "1G", "--context", "2K", "--batch", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["precision"] for row in json.loads(done.stdout)["precisions"]] == ["stored", "int8", "int4"]
    refused = moetis("fit", model, "--gpu-memory", "100M")
    assert refused.returncode == 2
    assert "does not fit" in refused.stderr
    assert refused.stdout == ""
