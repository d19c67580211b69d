"""A process that asks Ray for something without a cluster, as a thread may do after the cluster's end."""

from __future__ import annotations

import subprocess
import sys

from tests.cluster.running_cli import ROOT

ASK = """
import cluster.local_ray, ray
try:
    ray.put(1)
except ray.exceptions.RaySystemError:
    print("refused", ray.is_initialized())
"""


def test_who_asks_ray_without_a_cluster_is_given_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "refused False\n", done.stderr
