from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load_config
from placement.errors import ConfigError

GOOD = "model: m\ntopology: 2x2\nslots_per_rank: 10\nrun_dir: runs/x\n"


def _load(folder: Path, text: str) -> object:
    path = folder / "c.yaml"
    path.write_text(text)
    return load_config(path)


def test_the_demo_configuration_loads() -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "clusters" / "demo.yaml")
    assert config.slots_per_rank == 10
    assert config.worker_options().cache_share == 0.4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "modle: x\n", "key 'modle': Extra inputs are not permitted"),
        (GOOD.replace("10", "ten"), "key 'slots_per_rank': Input should be a valid integer (got 'ten')"),
        (GOOD.replace("10", "0"), "key 'slots_per_rank': Input should be greater than or equal to 1"),
        (GOOD.replace("10", "true"), "key 'slots_per_rank'"),
        (GOOD.replace("model: m\n", ""), "key 'model': Field required"),
        (GOOD + "workers: {cache_share: 1.5}\n", "key 'workers.cache_share': Input should be less than or equal to 1"),
        (GOOD + "workers: {device: tpu}\n", "key 'workers.device'"),
        (GOOD + "recorder: {rate: .nan}\n", "key 'recorder.rate'"),
        ("", "key 'the whole file'"),
        ("- a\n- b\n", "key 'the whole file'"),
        ("a: [1\n", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("a: !!python/object/apply:os.system ['echo']\n", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    assert "c.yaml" in str(caught.value)
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml': cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.yaml'"):
        load_config(tmp_path / "b.yaml")
