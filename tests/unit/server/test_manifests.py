"""The Kubernetes manifests follow the schema and use existing command options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lakh.cli.gateway import gateway
from lakh.cli.serve import serve
from lakh.server import proto

FILE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "serve.yaml"
COMMANDS = {"serve": serve, "gateway": gateway}


@pytest.fixture(scope="module")
def documents() -> dict[tuple[str, str], dict[str, Any]]:
    found = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    named = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(named) == len(found)
    return named


def test_manifests_follow_the_schema_strictly(documents: dict[tuple[str, str], dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate to run this")
    version = validate.latest_version()
    for document in documents.values():
        validate.validate(document, version, strict=True)
    broken = copy.deepcopy(documents["Deployment", "lakh-engine"])
    broken["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["periodSecond"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


@pytest.mark.parametrize("name", ["lakh-engine", "lakh-gateway"])
def test_pods_have_grpc_probes_and_drain_before_they_stop(
    documents: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    pod = documents["Deployment", name]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
    assert container["readinessProbe"]["grpc"]["service"] == "ready" != proto.SERVICE
    assert "service" not in container["livenessProbe"]["grpc"]  # a draining pod is alive
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if word.startswith("--"))
    known = {option for param in COMMANDS[container["args"][0]].params for option in param.opts}
    assert {f"--{option}" for option in options} <= known
    assert [options[api].rpartition(":")[2] for api in ("http", "grpc")] == [
        str(ports[api]) for api in ("http", "grpc")
    ]
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before_s + float(options["drain-s"])
    assert documents["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]["app"] == name
    assert documents["Service", name]["spec"]["selector"]["app"] == name


def test_engines_scale_with_the_queue_and_the_gateway_finds_them(
    documents: dict[tuple[str, str], dict[str, Any]],
) -> None:
    scaler = documents["HorizontalPodAutoscaler", "lakh-engine"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "lakh-engine"
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "lakh_num_requests_waiting"
    service = documents["Service", "lakh-engine"]["spec"]
    assert service["clusterIP"] == "None"  # the addresses of all engines
    words = documents["Deployment", "lakh-gateway"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"dns:lakh-engine:{service['ports'][0]['port']}" in words
    assert "--cache=redis://lakh-valkey:6379/0" in words
    assert documents["Service", "lakh-valkey"]["spec"]["ports"][0]["port"] == 6379
