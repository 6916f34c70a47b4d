"""deploy/kubernetes: rendered by kubectl, valid by Kubernetes' schema, and every name it uses is defined."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lakh.cli.dashboard import dashboard
from lakh.cli.gateway import gateway
from lakh.cli.serve import serve
from lakh.server import proto

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PARTS = ("storage", "serve", "dashboard", "train")
COMMANDS = {"serve": serve, "gateway": gateway, "dashboard": dashboard}
Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]


def named(documents: list[Manifest]) -> Manifests:
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


@pytest.fixture(scope="module")
def manifests() -> Manifests:
    """All objects as they are written."""
    paths = [path for part in PARTS for path in sorted((FOLDER / part).glob("*.yaml"))]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.name != "kustomization.yaml"]
    return named([document for text in texts for document in yaml.safe_load_all(text)])


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """All objects as `kubectl apply -k` sends them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: apt-get install kubernetes-client")
    copied = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(FOLDER, copied, ignore=shutil.ignore_patterns("keys"))
    subprocess.run([copied / "make-keys"], check=True, timeout=30)
    documents = []
    for part in PARTS:
        done = subprocess.run(
            [kubectl, "kustomize", str(copied / part)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        documents += list(yaml.safe_load_all(done.stdout))
    return named(documents)


def pods(manifests: Manifests) -> dict[str, Manifest]:
    """Pod templates by the name of their Deployment or Job."""
    return {name: found["spec"]["template"] for (_, name), found in manifests.items() if "template" in found["spec"]}


def validate_strictly(manifests: Manifests) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate to run this")
    version = validate.latest_version()
    for document in manifests.values():
        validate.validate(document, version, strict=True)
    broken = copy.deepcopy(next(found for (kind, _), found in manifests.items() if kind == "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["periodSecond"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


@pytest.fixture(scope="module")
def with_specs(manifests: Manifests) -> Manifests:
    return {key: found for key, found in manifests.items() if "spec" in found}


def test_manifests_follow_the_schema_strictly(manifests: Manifests) -> None:
    validate_strictly(manifests)


def test_kubectl_renders_manifests_that_follow_the_schema(rendered: Manifests) -> None:
    validate_strictly(rendered)
    assert {found["metadata"].get("namespace") for (kind, _), found in rendered.items() if kind != "Namespace"} == {
        "lakh"
    }
    secrets = {name for kind, name in rendered if kind == "Secret"}
    workloads = pods({key: found for key, found in rendered.items() if "spec" in found})
    assert set(workloads) == {"lakh-engine", "lakh-gateway", "lakh-valkey", "lakh-dashboard", "lakh-train"}
    for name, pod in workloads.items():
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets, name
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in rendered, name
        image = pod["spec"]["containers"][0]["image"]
        assert re.fullmatch(r"registry\.example\.com/lakh:(cpu|cuda)|valkey/valkey:\d+", image), name


def test_files_that_pods_read_are_keys_of_their_secret(with_specs: Manifests) -> None:
    made = {
        secret["name"]: {Path(file).name for file in secret["files"]}
        for part in PARTS
        for secret in yaml.safe_load((FOLDER / part / "kustomization.yaml").read_text()).get("secretGenerator", ())
    }
    for name, pod in pods(with_specs).items():
        words = " ".join(str(word) for word in pod["spec"]["containers"][0].get("args", ()))
        read = set(re.findall(r"=/secrets/(\S+)", words))
        mounted = [volume["secret"]["secretName"] for volume in pod["spec"].get("volumes", ()) if "secret" in volume]
        assert read <= set().union(*(made[secret] for secret in mounted)), name


def test_every_pod_has_a_network_policy_for_its_ports(with_specs: Manifests) -> None:
    policies = {name: found["spec"] for (kind, name), found in with_specs.items() if kind == "NetworkPolicy"}
    assert policies["deny-ingress"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    for name, pod in pods(with_specs).items():
        assert policies[name]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        open_ports = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        allowed = {port["port"] for rule in policies[name]["ingress"] for port in rule.get("ports", ())}
        assert allowed <= open_ports, name


@pytest.mark.parametrize("name", ["lakh-engine", "lakh-gateway", "lakh-dashboard"])
def test_commands_have_the_options_that_the_pods_use(with_specs: Manifests, name: str) -> None:
    container = pods(with_specs)[name]["spec"]["containers"][0]
    options = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
    assert options <= {option for param in COMMANDS[container["args"][0]].params for option in param.opts}


@pytest.mark.parametrize("name", ["lakh-engine", "lakh-gateway"])
def test_pods_have_grpc_probes_and_drain_before_they_stop(with_specs: Manifests, name: str) -> None:
    pod = pods(with_specs)[name]["spec"]
    container = pod["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
    assert container["readinessProbe"]["grpc"]["service"] == "ready" != proto.SERVICE
    assert "service" not in container["livenessProbe"]["grpc"]  # a draining pod is alive
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if word.startswith("--"))
    assert [options[api].rpartition(":")[2] for api in ("http", "grpc")] == [
        str(ports[api]) for api in ("http", "grpc")
    ]
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before_s + float(options["drain-s"])
    assert with_specs["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]["app"] == name
    assert with_specs["Service", name]["spec"]["selector"]["app"] == name


def test_engines_scale_with_the_queue_and_the_gateway_finds_them(with_specs: Manifests) -> None:
    scaler = with_specs["HorizontalPodAutoscaler", "lakh-engine"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "lakh-engine"
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "lakh_num_requests_waiting"
    service = with_specs["Service", "lakh-engine"]["spec"]
    assert service["clusterIP"] == "None"  # the addresses of all engines
    words = pods(with_specs)["lakh-gateway"]["spec"]["containers"][0]["args"]
    assert f"dns:lakh-engine:{service['ports'][0]['port']}" in words
    assert "--cache=redis://lakh-valkey:6379/0" in words
    assert with_specs["Service", "lakh-valkey"]["spec"]["ports"][0]["port"] == 6379


def test_the_training_job_starts_one_torchrun_per_node(with_specs: Manifests) -> None:
    job = with_specs["Job", "lakh-train"]["spec"]
    pod = job["template"]["spec"]
    assert job["completions"] == job["parallelism"]
    environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert int(environment["NNODES"]) == job["completions"]
    assert environment["GPUS"] == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    # The pods find pod 0 by its name in the indexed job.
    assert f"lakh-train-0.{pod['subdomain']}:29400" in pod["containers"][0]["args"][0]
    assert ("Service", pod["subdomain"]) in with_specs


def test_keys_are_kept_when_they_are_made_again(tmp_path: Path) -> None:
    script = tmp_path / "make-keys"
    shutil.copy(FOLDER / "make-keys", script)
    subprocess.run([script], check=True, timeout=30)
    before = {path: path.read_text() for path in tmp_path.rglob("keys/*")}
    subprocess.run([script], check=True, timeout=30)
    assert {path: path.read_text() for path in tmp_path.rglob("keys/*")} == before
    assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
    keys = {path.name: text.split() for path, text in before.items()}
    assert keys["engines"] == [*keys["engine"], "gateway"]
    assert all(len(words[0]) == 64 for words in keys.values())
