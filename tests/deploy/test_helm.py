"""The Helm chart: a real API server takes all that it renders, and DOLL reads the job file and the pod in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kube_cluster
import pytest
import yaml
from doll.config import KubernetesFleetConfig, load
from doll.local.kafka_jars import CACHE_ENV
from doll.provisioner.fleets.kubernetes import pods
from doll.provisioner.fleets.kubernetes.fleet import pod_template
from doll.provisioner.fleets.port import Order
from paths import ROOT

CHART: Final = ROOT / "deploy" / "helm" / "doll"
VALUES: Final = {
    "job": {
        "job": "digits", "task": {"class": "examples.digits.task:Digits"}, "data": {"workers": 4},
        "kafka": {"address": "kafka-bootstrap.kafka:9092"}, "redis": {"address": "redis://redis-master.redis:6379/0"},
        "checkpoint": {"folder": "s3://models/digits"},
        "plan": {"spot_usd_per_h": 0.05, "on_demand_usd_per_h": 0.15, "deadline_s": 3600},
    },
    "secrets": ["digits-passwords"], "secretFiles": {"/etc/doll/kafka": "kafka-ca"},
    "env": {"DOLL_KAFKA_CA": "/etc/doll/kafka/ca.crt"}, "image": {"pullSecrets": ["registry", "mirror"]},
}  # fmt: skip
PATHS: Final = {
    "ConfigMap": "/api/v1/namespaces/default/configmaps", "Service": "/api/v1/namespaces/default/services",
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
    "PersistentVolumeClaim": "/api/v1/namespaces/default/persistentvolumeclaims",
    "Deployment": "/apis/apps/v1/namespaces/default/deployments",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
}  # fmt: skip


def helm_program() -> str | None:
    """Helm on PATH, or in the cache: `GOBIN=~/.cache/doll go install helm.sh/helm/v3/cmd/helm@latest`."""
    root = os.environ.get(CACHE_ENV)
    cached = (Path(root) if root else Path.home() / ".cache" / "doll") / "helm"
    return shutil.which("helm") or (str(cached) if cached.is_file() else None)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(helm_program() is None, reason="no helm on PATH or in DOLL's cache"),
]


def rendered(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """What the chart makes of the values."""
    done = helm(folder, **changes)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def helm(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    (folder / "values.yaml").write_text(yaml.safe_dump({**VALUES, **changes}))
    command = [str(helm_program()), "template", "digits", str(CHART), "--values", str(folder / "values.yaml")]
    command += ["--kube-version", f"v{kube_cluster.VERSION}"]  # of a helm that `go install` has built it would be 1.20
    return subprocess.run(command, capture_output=True, text=True, check=False)


def named(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube_cluster.KubeCluster]:
    if (reason := kube_cluster.unavailable_reason()) is not None:
        pytest.skip(reason)
    with kube_cluster.KubeCluster(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"provisioner": {"enabled": False}, "producer": {"enabled": True}},
        {"server": {"standby": False, "fresh": True}, "metrics": {"enabled": False}, "evaluator": {"enabled": False}},
        {"checkpoints": {"existingClaim": "shared"}, "networkPolicy": {"enabled": False}},
        {"serve": {"enabled": True, "args": ["--split", "stable=95,latest=5"]}},
    ],
)
def test_the_api_server_takes_it(tmp_path: Path, cluster: kube_cluster.KubeCluster, changes: dict[str, Any]) -> None:
    documents = rendered(tmp_path, **changes)
    assert {document["kind"] for document in documents} <= PATHS.keys()
    for document in documents:
        cluster.call("POST", f"{PATHS[document['kind']]}?dryRun=All&fieldValidation=Strict", document)


def test_the_job_file_and_the_workers_pod_are_read(tmp_path: Path, cluster: kube_cluster.KubeCluster) -> None:
    files = named(rendered(tmp_path), "ConfigMap")["digits-job"]["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = load(tmp_path / "job.yaml")
    fleet = config.fleet
    assert isinstance(fleet, KubernetesFleetConfig)
    assert (config.job, config.data.workers, fleet.owner) == ("digits", 4, "digits-job")
    template = pod_template(config.path(fleet.pod_template), fleet)
    for market, value in (("spot", "spot"), ("on_demand", "on-demand")):
        pod = pods.manifest(Order(0, 1, market), template, fleet, config.cluster, "u1")  # type: ignore[arg-type]
        assert pod["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": value}
        cluster.call("POST", "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict", pod)


def test_roles_have_what_they_need_and_no_more(tmp_path: Path) -> None:
    documents = rendered(tmp_path)
    deployments = named(documents, "Deployment")
    assert deployments.keys() == {
        "digits-server", "digits-provisioner", "digits-evaluator", "digits-metrics", "digits-dashboard",
    }  # fmt: skip
    for deployment in (deployments["digits-server"], deployments["digits-provisioner"]):
        assert deployment["spec"]["replicas"] == 2
        template = deployment["spec"]["template"]["spec"]
        assert "--standby" in template["containers"][0]["args"]
        assert "podAntiAffinity" in template["affinity"]
    assert not named(documents, "PersistentVolumeClaim"), "what must survive a node is beside the checkpoints"
    alone = named(rendered(tmp_path, provisioner={"standby": False}), "Deployment")["digits-provisioner"]
    assert alone["spec"]["replicas"] == 1
    for name, deployment in deployments.items():
        spec = deployment["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] == (name == "digits-provisioner")
        assert spec["securityContext"]["runAsNonRoot"]
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"name": "DOLL_KAFKA_CA", "value": "/etc/doll/kafka/ca.crt"} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": "digits-passwords"}}]
        assert [each["name"] for each in spec["imagePullSecrets"]] == ["registry", "mirror"]
    (role,) = named(documents, "Role").values()
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["digits-job"], "verbs": ["get"]},
    ]
    monitored = rendered(tmp_path, metrics={"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    (monitor,) = named(monitored, "ServiceMonitor").values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    served = rendered(tmp_path, serve={"enabled": True, "args": ["--processes", "2"]})
    (container,) = named(served, "Deployment")["digits-serve"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve", "--host", "0.0.0.0", "--processes", "2"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    for kind in ("Service", "NetworkPolicy"):
        assert "digits-serve" in named(served, kind)
    (page,) = named(served, "Deployment")["digits-dashboard"]["spec"]["template"]["spec"]["containers"]
    assert page["args"] == ["dashboard", "--port", "8787", "--model-server", "http://digits-serve:8000"]
    assert "digits-dashboard" not in named(served, "Service"), (
        "it listens on loopback, which kubectl port-forward reaches"
    )
    assert page["livenessProbe"]["exec"]["command"][:2] == ["python", "-c"]
    compile(page["livenessProbe"]["exec"]["command"][2], "probe", "exec")
    assert "readinessProbe" not in page
    assert "digits-dashboard" not in named(rendered(tmp_path, dashboard={"enabled": False}), "Deployment")
    workers = named(rendered(tmp_path, provisioner={"enabled": False}, workers={"replicas": 7}), "Deployment")
    assert workers["digits-worker"]["spec"]["replicas"] == 7
    assert "digits-provisioner" not in workers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": {"job": "digits"}}, "checkpoint"),
        ({"workers": {"replicas": -1}}, "replicas"),
        ({"serve": {"scheme": "http"}}, "scheme"),
        ({"dashboard": {"enabled": "yes"}}, "dashboard"),
        ({"worker": {}}, "worker"),
        ({"env": {"A": 1}}, "env"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    done = helm(tmp_path, **changes)
    assert done.returncode != 0
    assert words in done.stderr
