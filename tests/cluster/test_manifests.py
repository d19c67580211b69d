"""The manifests, dashboard and alert rules under configs/ parse, and say nothing that the code does not know."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field

from cluster.cli import app
from cluster.config import config_from_dict
from cluster.metrics import GAUGES, LABELS
from placement.topology import topology_from_dict

CONFIGS = Path(__file__).parents[2] / "configs"
KUBERAY = sorted((CONFIGS / "kuberay").glob("*.yaml"))
DASHBOARD = CONFIGS / "monitoring" / "grafana-dashboard.json"
ALERTS = CONFIGS / "monitoring" / "alerts.yaml"
KINDS = {"RayCluster", "RayJob", "RayCronJob"}


def _documents() -> list[dict[str, Any]]:
    return [document for path in KUBERAY for document in yaml.safe_load_all(path.read_text())]


def _commands(node: Any) -> Iterator[list[str]]:
    """Every command line of Moetis in a manifest: an entrypoint, or a container's command and arguments."""
    if isinstance(node, dict):
        if isinstance(node.get("entrypoint"), str):
            yield shlex.split(node["entrypoint"])
        if "args" in node:
            yield [*node.get("command", []), *node["args"]]
        for value in node.values():
            yield from _commands(value)
    elif isinstance(node, list):
        for value in node:
            yield from _commands(value)


def _parse(command: Any, arguments: list[str], parent: Any = None) -> Any:
    """Parse a command line as the real one does, without running it. Unknown options raise."""
    context = command.make_context(command.name, list(arguments), parent=parent)
    if not hasattr(command, "resolve_command"):
        return context
    name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None, name
    return _parse(found, rest, context)


def test_every_command_of_the_manifests_is_one_that_the_command_line_knows() -> None:
    lines = [line for document in _documents() for line in _commands(document)]
    seen = set()
    for line in lines:
        start = line.index("cluster") + 1
        assert line[start - 3 : start] == ["python", "-m", "cluster"]
        context = _parse(typer.main.get_command(app), line[start:])
        assert context.params["config"] == "/etc/moetis/cluster.yaml"
        seen.add(context.info_name)
    assert seen == {"serve", "rebalance"}
    assert len(lines) == 4


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        _parse(typer.main.get_command(app), ["rebalance", "--config", "x", "--nightly"])


def test_the_cluster_file_and_topology_that_the_manifests_mount_are_valid() -> None:
    (data,) = [each["data"] for each in _documents() if each["kind"] == "ConfigMap"]
    config = config_from_dict(yaml.safe_load(data["cluster.yaml"]), source="cluster.yaml")
    topology = topology_from_dict(yaml.safe_load(data["topology.yaml"]), source="topology.yaml")
    (cluster,) = [each for each in _documents() if each["kind"] == "RayCluster"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert topology.num_nodes == workers["replicas"]
    assert topology.num_ranks == workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(config.run_dir), "/etc/moetis", "/models"} <= mounted
    assert config.topology.startswith("/etc/moetis/")


def test_jobs_name_the_cluster_that_is_there_and_the_images_are_one() -> None:
    documents = _documents()
    (cluster,) = [each["metadata"]["name"] for each in documents if each["kind"] == "RayCluster"]
    for document in documents:
        if document["kind"] in KINDS:
            assert document["apiVersion"] == "ray.io/v1"
        spec = document.get("spec", {})
        for job in (spec, spec.get("jobTemplate", {})):
            if "entrypoint" in job:
                assert job["clusterSelector"] == {"ray.io/cluster": cluster}
    images = set(re.findall(r"image: (\S+)", "".join(path.read_text() for path in KUBERAY)))
    assert images == {"moetis:0.1.0"}
    pinned = re.search(r"^ray==(\S+)$", (CONFIGS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"rayproject/ray:{pinned[1]}-" in (CONFIGS / "kuberay" / "Dockerfile").read_text()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Annotations(_Strict):
    summary: str
    description: str


class _Severity(_Strict):
    severity: Literal["critical", "warning", "info"]


class _Rule(_Strict):
    alert: str = Field(pattern=r"^Moetis[A-Za-z]+$")
    expr: str
    for_: str | None = Field(default=None, alias="for", pattern=r"^\d+[smhd]$")
    labels: _Severity
    annotations: _Annotations


class _Group(_Strict):
    name: str
    rules: list[_Rule] = Field(min_length=1)


class _Rules(_Strict):
    groups: list[_Group] = Field(min_length=1)


def _metrics(text: str) -> set[str]:
    return set(re.findall(r"\bray_(moetis_\w+)", text))


def test_the_alert_rules_have_prometheus_form_and_balanced_expressions() -> None:
    rules = _Rules.model_validate(yaml.safe_load(ALERTS.read_text())).groups[0].rules
    assert len({rule.alert for rule in rules}) == len(rules)
    for rule in rules:
        for opening, closing in ("()", "[]", "{}"):
            assert rule.expr.count(opening) == rule.expr.count(closing), rule.alert
        assert _metrics(rule.expr), rule.alert


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS], ids=lambda path: path.name)
def test_every_metric_that_is_asked_for_exists(path: Path) -> None:
    assert _metrics(path.read_text()) <= set(GAUGES)


def test_every_metric_is_on_the_dashboard_and_labels_are_those_of_the_code() -> None:
    text = DASHBOARD.read_text()
    assert _metrics(text) == set(GAUGES)
    asked = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", text))
    assert asked == set(LABELS.values())


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert all(target["expr"] for target in panel["targets"])


def test_few_series_are_made() -> None:
    assert set(LABELS) <= set(GAUGES)
    assert set(LABELS.values()) <= {"what", "decision"}
    assert len(GAUGES) <= 25
