"""The manifests for Kubernetes: its published schemas, its strictest profile, and this server's names."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from ndif.config.reference import unread
from tests.deploy.dockerfile import DOCKER, ROOT
from tests.deploy.test_docker_files import OURS, SERVICES

FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.33"
FILES = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
OBJECTS: list[dict[str, Any]] = [
    document for file in FILES for document in yaml.safe_load_all((FOLDER / file).read_text())
]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [item for item in OBJECTS if item["kind"] in kinds]


def templates() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the template of every pod."""
    for item in of_kind("Deployment", "StatefulSet"):
        yield item["metadata"]["name"], item["spec"]["template"]
    [cluster] = of_kind("RayCluster")
    yield "ray-head", cluster["spec"]["headGroupSpec"]["template"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        yield f"ray-{group['groupName']}", group["template"]


PODS = dict(templates())


def test_manifests_validate_against_kubernetes_schema(subtests: pytest.Subtests) -> None:
    for manifest in OBJECTS:
        if manifest["kind"] == "RayCluster":  # which is not Kubernetes' own
            continue
        with subtests.test(f"{manifest['kind']}-{manifest['metadata']['name']}"):
            kubernetes_validate.validate(manifest, VERSION, strict=True)
            assert manifest["metadata"].get("namespace", "ndif") == "ndif"


def test_pod_templates_validate_against_kubernetes_schema(subtests: pytest.Subtests) -> None:
    [deployment] = of_kind("Deployment")
    for name, template in PODS.items():
        with subtests.test(name):
            around = copy.deepcopy(deployment)
            around["spec"]["template"] = template
            kubernetes_validate.validate(around, VERSION, strict=True)


def test_ray_parses_cluster_manifest() -> None:
    [cluster] = of_kind("RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    read = _derive_autoscaling_config_from_ray_cr(cluster)
    workers = read["available_node_types"]["gpu"]
    assert workers["resources"]["GPU"] == 1
    assert (workers["min_workers"], workers["max_workers"]) == (1, 8)
    import ray

    assert cluster["spec"]["rayVersion"] == ray.__version__


def test_pods_meet_restricted_profile(subtests: pytest.Subtests) -> None:
    for name, template in PODS.items():
        with subtests.test(name):
            pod = template["spec"]
            whole = pod["securityContext"]
            assert whole["runAsNonRoot"] is True
            assert whole["runAsUser"] > 0
            assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is False
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            for container in pod["containers"]:
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["readOnlyRootFilesystem"] is True
                assert container["readinessProbe"]
                assert container["livenessProbe"]
                assert container["resources"]["limits"]["memory"]
            kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
            assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}


@pytest.mark.process
def test_pods_get_secrets_only_by_reference(tmp_path: Path, subtests: pytest.Subtests) -> None:
    subprocess.run(["sh", DOCKER / "make-secrets.sh", tmp_path], check=True)
    files = {file.name for file in tmp_path.iterdir()}
    for name, template in PODS.items():
        with subtests.test(name):
            pod = template["spec"]
            mounted = {
                item["key"]
                for volume in pod["volumes"]
                if "secret" in volume
                for item in volume["secret"]["items"]
            }
            assert mounted <= files
            [container] = pod["containers"]
            environment = {
                variable["name"]: variable.get("value", "") for variable in container.get("env", [])
            }
            assert unread(environment) == []
            text = yaml.safe_dump(container)
            for key in (
                mounted
                - {name for name in mounted if name.startswith("ndif_")}
                - {"postgres_password"}
            ):
                assert f"/run/secrets/{key}" in text
            # Nodes that run user code have no control-plane secrets.
            if name.startswith("ray"):
                assert not mounted & {"ndif_cluster_secret", "postgres_password"}


def test_store_images_match_compose() -> None:
    images = {SERVICES[name]["image"] for name in SERVICES.keys() - OURS}
    for item in of_kind("StatefulSet"):
        [container] = item["spec"]["template"]["spec"]["containers"]
        assert container["image"] in images


def test_network_policies_select_existing_pods() -> None:
    labels = {pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in PODS.values()}
    ports = {
        port["name"]
        for pod in PODS.values()
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    }
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    assert policies["nothing"]["podSelector"] == {}
    selected: set[str] = set()
    for policy in policies.values():
        selector = policy["podSelector"]
        selected |= set(selector.get("matchLabels", {}).values())
        for expression in selector.get("matchExpressions", []):
            selected |= set(expression["values"])
        for rule in policy.get("ingress", []):
            assert {port["port"] for port in rule.get("ports", [])} <= ports
    assert selected == labels
