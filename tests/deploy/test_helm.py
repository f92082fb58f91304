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
from doll.provisioner.fleets.kubernetes import gangs, pods
from doll.provisioner.fleets.kubernetes.fleet import pod_template, stage_template
from doll.provisioner.fleets.port import Order
from doll.provisioner.machines import check_machines
from paths import ROOT
from waiting import until

COMPONENT: Final = "app.kubernetes.io/component"
CHART: Final = ROOT / "deploy" / "helm" / "doll"
VALUES: Final[dict[str, Any]] = {
    "job": {
        "job": "digits",
        "task": {"class": "examples.digits.task:Digits"},
        "data": {"workers": 4},
        "kafka": {"address": "kafka-bootstrap.kafka:9092"},
        "redis": {"address": "redis://redis-master.redis:6379/0"},
        "checkpoint": {"folder": "s3://models/digits"},
        "plan": {"spot_usd_per_h": 0.05, "on_demand_usd_per_h": 0.15, "deadline_s": 3600},
    },
    "secrets": ["digits-passwords"],
    "secretFiles": {"/etc/doll/kafka": "kafka-ca"},
    "env": {"DOLL_KAFKA_CA": "/etc/doll/kafka/ca.crt"},
    "image": {"pullSecrets": ["registry", "mirror"]},
}
PIPELINE: Final = {
    **VALUES["job"], "worker": {"pipeline": {"stages": 2, "remote": True}},
    "training": {"policy": {"name": "wsp", "wave_batches": 2}},
}  # fmt: skip
JOIN: Final = {
    "features": {"topic": "shown"},
    "labels": [{"topic": "clicks", "name": "click"}],
    "window_s": 60,
    "joiners": 3,
}
PATHS: Final = {
    "ConfigMap": "/api/v1/namespaces/default/configmaps", "Service": "/api/v1/namespaces/default/services",
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
    "PersistentVolumeClaim": "/api/v1/namespaces/default/persistentvolumeclaims",
    "Deployment": "/apis/apps/v1/namespaces/default/deployments",
    "Job": "/apis/batch/v1/namespaces/default/jobs",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/default/poddisruptionbudgets",
    "Pod": "/api/v1/namespaces/default/pods",
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


def by_role(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The Jobs by their roles; their names have a checksum."""
    return {each["metadata"]["labels"][COMPONENT]: each for each in documents if each["kind"] == "Job"}


def named(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube_cluster.KubeCluster]:
    if (reason := kube_cluster.unavailable_reason()) is not None:
        pytest.skip(reason)
    with kube_cluster.KubeCluster(tmp_path_factory.mktemp("kubernetes"), controllers=True) as made:
        yield made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"provisioner": {"enabled": False}, "producer": {"enabled": True}},
        {"server": {"standby": False, "fresh": True}, "metrics": {"enabled": False}, "evaluator": {"enabled": False}},
        {"checkpoints": {"existingClaim": "shared"}, "networkPolicy": {"enabled": False}},
        {"serve": {"enabled": True, "args": ["--split", "stable=95,latest=5"]}},
        {"provisioner": {"enabled": False}, "queue": {"name": "spot"}, "workers": {"queue": {"minWorkers": 1}}},
        {"job": {**VALUES["job"], "data": {"workers": 4, "join": JOIN}}},
        {"job": PIPELINE},
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
        pod = pods.manifest(Order(0, 1, market), template, fleet, config.cluster, config.job, "u1")  # type: ignore[arg-type]
        assert pod["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": value}
        cluster.call("POST", "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict", pod)


def test_a_pipeline_over_machines_has_a_pod_for_stages(tmp_path: Path, cluster: kube_cluster.KubeCluster) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    queue = {"kueue.x-k8s.io/queue-name": "spot"}
    claim = {"checkpoints": {"existingClaim": "shared"}}
    documents = rendered(tmp_path, job=PIPELINE, stages=gpus, workers={"podLabels": queue}, **claim)
    for name, text in named(documents, "ConfigMap")["digits-job"]["data"].items():
        (tmp_path / name).write_text(text)
    config = load(tmp_path / "job.yaml")
    fleet = config.fleet
    assert isinstance(fleet, KubernetesFleetConfig)
    assert config.machines_per_worker == 3
    check_machines(config)
    of_stage = stage_template(config, fleet)
    assert of_stage is not None
    pod = pods.manifest(Order(0, 1, "spot", machines=3), of_stage, fleet, config.cluster, config.job, "u1")
    gangs.add_to_gang(pod, "doll-digits-0-1-spot", 3, fleet.container, stage=1)
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["stage"]
    assert container["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": 1}
    assert "checkpoints" not in [each["name"] for each in pod["spec"]["volumes"]], "a stage needs none"
    assert pod["spec"]["serviceAccountName"] == "digits-worker"
    assert pod["metadata"]["labels"].keys() >= {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"}
    cluster.call("POST", "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict", pod)
    policy = named(documents, "NetworkPolicy")["digits-stage"]["spec"]
    assert pod["metadata"]["labels"].items() >= policy["podSelector"]["matchLabels"].items()
    sources = [each["podSelector"]["matchLabels"][COMPONENT] for each in policy["ingress"][0]["from"]]
    assert sources == ["worker", "stage"]


def test_nobody_would_launch_the_stages_without_the_provisioner(tmp_path: Path) -> None:
    done = helm(tmp_path, job=PIPELINE, provisioner={"enabled": False})
    assert done.returncode != 0
    assert "job.worker.pipeline.remote: expected provisioner.enabled" in done.stderr


def test_roles_have_what_they_need_and_no_more(tmp_path: Path) -> None:
    documents = rendered(tmp_path)
    deployments, jobs = named(documents, "Deployment"), by_role(documents)
    assert deployments.keys() == {"digits-metrics", "digits-dashboard"}
    assert jobs.keys() == {"server", "provisioner", "evaluator"}, "what ends with the job, which nobody starts again"
    for role in ("server", "provisioner"):
        assert jobs[role]["spec"]["parallelism"] == jobs[role]["spec"]["completions"] == 2
        template = jobs[role]["spec"]["template"]["spec"]
        assert "--standby" in template["containers"][0]["args"]
        assert {each["topologyKey"] for each in template["topologySpreadConstraints"]} == {
            "topology.kubernetes.io/zone", "kubernetes.io/hostname",
        }  # fmt: skip
        budget = named(documents, "PodDisruptionBudget")[f"digits-{role}"]["spec"]
        assert budget["minAvailable"] == 1
        assert budget["selector"]["matchLabels"].items() <= jobs[role]["spec"]["template"]["metadata"]["labels"].items()
    assert not named(documents, "PersistentVolumeClaim"), "what must survive a node is beside the checkpoints"
    alone = by_role(rendered(tmp_path, provisioner={"standby": False}))["provisioner"]
    assert alone["spec"]["completions"] == 1
    for name, owner in {**deployments, **jobs}.items():
        spec = owner["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] == (name == "provisioner")
        assert spec.get("restartPolicy", "Always") == ("OnFailure" if name in jobs else "Always")
        assert spec["securityContext"]["runAsNonRoot"]
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"name": "DOLL_KAFKA_CA", "value": "/etc/doll/kafka/ca.crt"} in container["env"]
        stopped = {"name": "DOLL_STOPPED_EXIT_CODE", "value": "143"}
        assert (stopped in container["env"]) == (name in jobs), "an evicted pod has not ended"
        assert container["envFrom"] == [{"secretRef": {"name": "digits-passwords"}}]
        assert [each["name"] for each in spec["imagePullSecrets"]] == ["registry", "mirror"]
    test = named(documents, "Pod")["digits-test"]
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert test["spec"]["restartPolicy"] == "Never"
    assert test["spec"]["containers"][0]["args"] == ["doctor"]
    assert test["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "digits-passwords"}}]
    (rights,) = named(documents, "Role").values()
    assert rights["rules"] == [
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
    workers = by_role(rendered(tmp_path, provisioner={"enabled": False}, workers={"replicas": 7}))
    assert workers["worker"]["spec"]["completions"] == 7
    assert "provisioner" not in workers


def test_a_job_in_shards_has_a_pod_for_each(tmp_path: Path) -> None:
    documents = rendered(tmp_path, job={**VALUES["job"], "ps": {"shards": 3}})
    shards = by_role(documents)["shard"]["spec"]
    assert (shards.get("completionMode"), shards["completions"], shards["parallelism"]) == (None, 3, 3)
    (container,) = shards["template"]["spec"]["containers"]
    assert container["args"] == ["shard"]
    for undivided in ({}, {"ps": {"shards": 1}}):
        assert "shard" not in by_role(rendered(tmp_path, job={**VALUES["job"], **undivided}))
    assert "expected a number, got auto" in helm(tmp_path, job={**VALUES["job"], "ps": {"shards": "auto"}}).stderr


def test_a_job_with_a_join_has_as_many_joiners_each_with_a_number(tmp_path: Path) -> None:
    documents = rendered(tmp_path, job={**VALUES["job"], "data": {"workers": 4, "join": JOIN}})
    joiners = by_role(documents)["join"]["spec"]
    assert (joiners["completionMode"], joiners["completions"], joiners["parallelism"]) == ("Indexed", 3, 3)
    (container,) = joiners["template"]["spec"]["containers"]
    assert container["args"] == ["join"]
    (number,) = [each for each in container["env"] if each["name"] == "DOLL_JOINER"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert number["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert named(documents, "PodDisruptionBudget")["digits-join"]["spec"]["minAvailable"] == 2
    assert "join" not in by_role(rendered(tmp_path))
    one = {**VALUES["job"], "data": {"join": {**JOIN, "joiners": None}}}
    assert by_role(rendered(tmp_path, job=one))["join"]["spec"]["completions"] == 1


def test_an_upgrade_makes_other_jobs(tmp_path: Path) -> None:
    """The template of a Job cannot be changed."""

    def names(**changes: Any) -> set[str]:
        return set(named(rendered(tmp_path, **changes), "Job"))

    before = names()
    assert names() == before
    assert not names(image={"tag": "2"}) & before
    assert len(names(evaluator={"resources": {"limits": {"memory": "3Gi"}}}) & before) == 2


def test_workers_have_neither_checkpoints_nor_what_is_not_theirs(tmp_path: Path) -> None:
    documents = rendered(
        tmp_path, serviceAccount={"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/checkpoints"}},
        server={"secrets": ["bucket"]}, checkpoints={"existingClaim": "shared"},
    )  # fmt: skip
    files = named(documents, "ConfigMap")["digits-job"]["data"]
    pod = yaml.safe_load(files["worker-pod.yaml"])["spec"]
    accounts = named(documents, "ServiceAccount")
    assert pod["serviceAccountName"] == "digits-worker"
    assert "annotations" not in accounts["digits-worker"]["metadata"]
    assert "annotations" in accounts["digits-job"]["metadata"]
    assert "checkpoints" not in {volume["name"] for volume in pod["volumes"]}
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "digits-passwords"}}]
    server = by_role(documents)["server"]["spec"]["template"]["spec"]
    assert "checkpoints" in {volume["name"] for volume in server["volumes"]}
    assert {"secretRef": {"name": "bucket"}} in server["containers"][0]["envFrom"]
    policy = named(documents, "NetworkPolicy")["digits-job"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "169.254.169.254/32" in policy["egress"][0]["to"][0]["ipBlock"]["except"]


def test_labels_annotations_and_a_digest_reach_the_pods(tmp_path: Path) -> None:
    digest = "sha256:" + "a" * 64
    documents = rendered(
        tmp_path, podAnnotations={"karpenter.sh/do-not-disrupt": "true"}, image={"digest": digest},
        workers={"podLabels": {"kueue.x-k8s.io/queue-name": "spot"}},
    )  # fmt: skip
    pod = yaml.safe_load(named(documents, "ConfigMap")["digits-job"]["data"]["worker-pod.yaml"])
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spot"
    assert pod["spec"]["containers"][0]["image"] == f"doll@{digest}"
    for owner in (*named(documents, "Deployment").values(), *named(documents, "Job").values()):
        metadata = owner["spec"]["template"]["metadata"]
        assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert "kueue.x-k8s.io/queue-name" not in metadata["labels"]


def test_jobs_and_workers_wait_in_the_queues_that_are_set_for_them(tmp_path: Path) -> None:
    def queue_of(labels: dict[str, str]) -> tuple[str | None, str | None]:
        return labels.get("kueue.x-k8s.io/queue-name"), labels.get("kueue.x-k8s.io/priority-class")

    queue = {"name": "roles", "priorityClass": "high"}
    documents = rendered(tmp_path, queue=queue, workers={"queue": {"name": "spot"}})
    pod = yaml.safe_load(named(documents, "ConfigMap")["digits-job"]["data"]["worker-pod.yaml"])
    assert queue_of(pod["metadata"]["labels"]) == ("spot", "high")
    for job in named(documents, "Job").values():
        assert queue_of(job["metadata"]["labels"]) == ("roles", "high")
        assert queue_of(job["spec"]["template"]["metadata"]["labels"]) == (None, None)
    for role in named(documents, "Deployment").values():
        assert queue_of(role["metadata"]["labels"]) == (None, None)

    fewer = {"queue": {"name": "spot", "minWorkers": 2}}
    documents = rendered(tmp_path, queue=queue, workers=fewer, provisioner={"enabled": False})
    jobs = {job["metadata"]["labels"]["app.kubernetes.io/component"]: job for job in named(documents, "Job").values()}
    assert queue_of(jobs["worker"]["metadata"]["labels"]) == ("spot", "high")
    assert jobs["worker"]["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    assert queue_of(jobs["server"]["metadata"]["labels"]) == ("roles", "high")
    assert "annotations" not in jobs["server"]["metadata"]


def test_a_job_replaces_a_server_that_was_evicted_and_not_one_that_has_ended(
    tmp_path: Path, cluster: kube_cluster.KubeCluster
) -> None:
    """On the real controller of Jobs; the kubelets' reports are ours."""
    job = by_role(rendered(tmp_path))["server"]
    cluster.call("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "digits-job"}})
    cluster.call("POST", PATHS["Job"], job)
    at = "/api/v1/namespaces/default/pods"

    def pods(phase: str = "Pending") -> list[str]:
        listed = cluster.call("GET", f"{at}?labelSelector=job-name%3D{job['metadata']['name']}")["items"]
        return [pod["metadata"]["name"] for pod in listed if pod["status"]["phase"] == phase]

    def ends(name: str, code: int) -> None:
        state = {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}
        container = {
            "name": "server",
            "image": "doll",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{**container, "state": state}]}
        cluster.call("PATCH", f"{at}/{name}/status", {"status": status}, "application/merge-patch+json")

    until(lambda: len(pods()) == 2, lambda: "the Job's pods")
    evicted, leader = pods()
    ends(evicted, 143)
    until(lambda: len(pods()) == 2, lambda: "a replacement")
    for name in pods():
        ends(name, 0)

    def is_complete() -> bool:
        conditions = cluster.call("GET", f"{PATHS['Job']}/{job['metadata']['name']}")["status"].get("conditions", ())
        return any(each["type"] == "Complete" and each["status"] == "True" for each in conditions)

    until(is_complete, lambda: "the Job's end")
    assert pods() == []
    assert leader in pods("Succeeded")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": {"job": "digits"}}, "checkpoint"),
        ({"workers": {"replicas": -1}}, "replicas"),
        ({"serve": {"scheme": "http"}}, "scheme"),
        ({"dashboard": {"enabled": "yes"}}, "dashboard"),
        ({"worker": {}}, "worker"),
        ({"env": {"A": 1}}, "env"),
        ({"image": {"digest": "1"}}, "digest"),
        ({"queue": {"name": "Spot queue"}}, "queue"),
        ({"workers": {"queue": {"min": 1}}}, "queue"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    done = helm(tmp_path, **changes)
    assert done.returncode != 0
    assert words in done.stderr
