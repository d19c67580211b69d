from __future__ import annotations

from pathlib import Path

import pytest

from cluster.rundir import held
from placement.errors import ConfigError


def test_two_clusters_can_not_share_a_run_dir(tmp_path: Path) -> None:
    with held(tmp_path / "run"), pytest.raises(ConfigError, match="another cluster runs there"), held(tmp_path / "run"):
        pass


def test_a_run_dir_is_free_again_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path / "run"):
            assert (tmp_path / "run").is_dir()


def test_a_run_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file': cannot be used: File exists"), held(tmp_path / "file"):
        pass
