"""The fleet of pods on a real API server with scheduler and controllers; the nodes' kubelets are played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import kube_cluster
import pytest
import yaml
from doll.config import JobConfig, KubernetesFleetConfig, parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.kubernetes.diagnosis import ask_kubernetes
from doll.provisioner.fleets.kubernetes.fleet import connect, pod_template
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.machines import open_machines
from doll.records.check import Check
from doll.theory.cost import Prices
from fleet_rigs import refused
from kube_nodes import Nodes, container_status
from waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(kube_cluster.unavailable_reason() is not None, reason=str(kube_cluster.unavailable_reason())),
]

POD = """
apiVersion: v1
kind: Pod
spec:
  terminationGracePeriodSeconds: 5
  containers:
  - name: worker
    image: doll:local
    resources: {requests: {cpu: 3}}
"""
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "doll-provisioner"},
    "rules": [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["my-job"], "verbs": ["get"]},
    ],
}  # fmt: skip
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "doll-provisioner"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "doll-provisioner"},
    "subjects": [{"kind": "User", "name": "provisioner", "apiGroup": "rbac.authorization.k8s.io"}],
}  # fmt: skip
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kube_cluster.KubeCluster]:
    with kube_cluster.KubeCluster(tmp_path_factory.mktemp("kubernetes"), controllers=True) as made:
        yield made


def job(folder: Path, kubeconfig: Path, **fleet: Any) -> JobConfig:
    (folder / "pod.yaml").write_text(POD)
    settings = {"kind": "kubernetes", "pod_template": str(folder / "pod.yaml"), "kubeconfig": str(kubeconfig), **fleet}
    return parse(
        "job: digits\ntask: {class: 'examples.digits.task:Digits'}\n"
        "plan: {spot_usd_per_h: 0.1, on_demand_usd_per_h: 0.3}\n" + yaml.safe_dump({"fleet": settings})
    )


def listed(fleet: Fleet) -> dict[str, Instance]:
    return {instance.id: instance for instance in fleet.instances()}


def test_doctor_names_each_right_that_is_missing_and_what_a_pod_would_meet(
    cluster: kube_cluster.KubeCluster, tmp_path: Path
) -> None:
    namespace = "doctors"

    def ask(user: Path, **fleet: Any) -> dict[str, Check]:
        checks = ask_kubernetes(job(tmp_path, user, **{"namespace": namespace, **fleet}))
        return {check.name: check for check in checks}

    asked = ask(cluster.user("provisioner"), owner="my-job")
    rights = asked["Kubernetes: rights on pods"]
    assert (rights.result, rights.detail) == ("failed", "refused in doctors: create, get, list, delete")
    assert "kubectl create role doll-provisioner-pods --verb=create,get,list,delete --resource=pods" in rights.todo
    assert asked["Kubernetes: right to get configmap my-job"].result == "failed"
    assert asked["Kubernetes: nodes for spot"].result == "unknown", "it may not list nodes"
    assert not any("a worker's pod" in what for what in asked), "it may create none"

    asked = ask(cluster.kubeconfig)
    missing = asked["Kubernetes: namespace doctors"]
    assert (missing.result, missing.todo.partition(",")[0]) == ("failed", "kubectl create namespace doctors")
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    until(lambda: _answers(cluster, account), "the namespace's account")
    asked = ask(cluster.kubeconfig)
    assert {finding.result for finding in asked.values()} <= {"ok", "warning"}
    assert "doll:local" in asked["Kubernetes: a worker's pod, spot"].detail

    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    cluster.call("POST", f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    until(lambda: "Kubernetes: quota few" in ask(cluster.kubeconfig), "the quota to be counted")
    asked = ask(cluster.kubeconfig)
    assert asked["Kubernetes: quota few"].detail.startswith("0 of 0 pods are left")
    pod = asked["Kubernetes: a worker's pod, on-demand"]
    assert pod.result == "failed"
    assert "exceeded quota: few" in pod.detail
    assert cluster.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"] == [], "it changes nothing"


def _answers(cluster: kube_cluster.KubeCluster, path: str) -> bool:
    try:
        cluster.call("GET", path)
    except HTTPError:
        return False
    return True


def test_markets_get_their_nodes_and_lose_them(cluster: kube_cluster.KubeCluster, tmp_path: Path) -> None:
    """With the rights of docs/guide/kubernetes.md, and no others."""
    user = cluster.user("provisioner")
    config = job(tmp_path, user, node_timeout_s=1, owner="my-job")
    cluster.call("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "my-job"}})
    with open_machines(config, tmp_path) as machines:
        # Without its role it may do nothing, and says what it needs.
        with pytest.raises(ConfigError, match=r"GET pods in namespace default: .*cannot list resource \"pods\""):
            machines.fleet.instances()
        error = refused(machines.fleet, Order(0, 1, "spot"))
        assert error.failure is LaunchFailure.CONFIG
        assert 'cannot get resource "pods"' in str(error)
        for kind, body in (("roles", ROLE), ("rolebindings", BINDING)):
            cluster.call("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/default/{kind}", body)
        until(lambda: _permitted(machines.fleet), "the role to be in force")
        assert machines.prices.current(0.0) == Prices(0.1, 0.3)

        nodes = Nodes(cluster)
        nodes.add("spot-1", "spot")
        nodes.add("od-1", "on-demand")
        one = machines.fleet.launch(Order(0, 1, "spot"))
        two = machines.fleet.launch(Order(1, 1, "on_demand"))
        until(lambda: (nodes.of(one.id), nodes.of(two.id)) == ("spot-1", "od-1"), "both to be scheduled")
        for name in (one.id, two.id):
            nodes.report(name, phase="Running")
        assert {each.state for each in machines.fleet.instances()} == {InstanceState.RUNNING}

        # No node takes a second pod of three processors: the market counts as dry for a while, the other is open.
        three = machines.fleet.launch(Order(2, 1, "spot"))
        until(lambda: not listed(machines.fleet)[three.id].is_alive, "the pod to be given back")
        error = refused(machines.fleet, Order(2, 1, "spot", attempt=1))
        assert (error.failure, error.pools) == (LaunchFailure.CAPACITY, {"pod/cluster"})
        assert "Insufficient cpu" in str(error)
        assert machines.fleet.launch(Order(2, 1, "on_demand", attempt=1)).is_alive

        # A drain: the eviction API marks it, and its grace period is the notice.
        nodes.drain("spot-1")
        noticed = listed(machines.fleet)[one.id]
        assert noticed.is_alive
        assert noticed.notice_s is not None
        nodes.forget(one.id)
        assert listed(machines.fleet)[one.id].end_reason is EndReason.INTERRUPTED

        # What the provisioner ends itself is no interruption.
        machines.fleet.terminate([two.id])
        assert listed(machines.fleet)[two.id].state is InstanceState.ENDING
        nodes.forget(two.id)
        assert listed(machines.fleet)[two.id].end_reason is EndReason.TERMINATED

        # Who removes the job removes its pods, though no provisioner runs any more.
        cluster.call("DELETE", "/api/v1/namespaces/default/configmaps/my-job")
        until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in nodes.pods()), "the pods to end with it")


def _permitted(fleet: Any) -> bool:
    try:
        fleet.instances()
    except ConfigError:
        return False
    return True


def test_bad_input_is_one_line(cluster: kube_cluster.KubeCluster, tmp_path: Path) -> None:
    with open_machines(job(tmp_path, cluster.kubeconfig, namespace="nowhere"), tmp_path) as machines:
        assert machines.fleet.instances() == []
        error = refused(machines.fleet, Order(0, 1, "spot"))
        assert (error.failure, 'namespaces "nowhere" not found' in str(error)) == (LaunchFailure.CONFIG, True)
    # An image that cannot be pulled, as a kubelet reports it: the pod is given back, and the next order says so.
    bad_image = {"cluster": "bad-image", "node_timeout_s": 0.001}
    with open_machines(job(tmp_path, cluster.kubeconfig, **bad_image), tmp_path) as machines:
        made = machines.fleet.launch(Order(0, 1, "on_demand"))
        nodes = Nodes(cluster)
        nodes.bind(made.id)
        waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image doll:local"}
        nodes.report(made.id, containerStatuses=[container_status({"waiting": waiting})])
        assert listed(machines.fleet)[made.id].end_reason is EndReason.FAILED
        error = refused(machines.fleet, Order(1, 1, "spot"))
        assert error.failure is LaunchFailure.REFUSED
        assert "container worker: ImagePullBackOff: Back-off pulling image doll:local; correct" in str(error)
        # A pod of this name that is not ours.
        stranger = {"metadata": {"name": "doll-bad-image-5-1-spot"}, "spec": yaml.safe_load(POD)["spec"]}
        cluster.call("POST", PODS, stranger)
        error = refused(machines.fleet, Order(5, 1, "spot"))
        assert "which is no worker of cluster bad-image" in str(error)
    # A quota, and an API server that is not there.
    quota = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "0"}}}
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": "full"}})
    cluster.call("POST", "/api/v1/namespaces/full/resourcequotas", quota)
    with open_machines(job(tmp_path, cluster.kubeconfig, namespace="full"), tmp_path) as machines:
        assert "quota" in str(until_refused(machines.fleet, LaunchFailure.SPOT_QUOTA))
    text = cluster.kubeconfig.read_text().replace(cluster.url, "https://127.0.0.1:9")
    (tmp_path / "elsewhere").write_text(text)
    with open_machines(job(tmp_path, tmp_path / "elsewhere", timeout_s=2), tmp_path) as machines:
        with pytest.raises(ServiceUnavailableError, match="the API server does not answer"):
            machines.fleet.instances()
        assert refused(machines.fleet, Order(0, 1, "spot")).failure is LaunchFailure.THROTTLED


def until_refused(fleet: Any, failure: LaunchFailure) -> LaunchError:
    """The controller of quotas counts a moment later than the quota is made."""
    errors: list[LaunchError] = []

    def tried() -> bool:
        try:
            fleet.launch(Order(len(errors), 1, "spot"))
        except LaunchError as error:
            errors.append(error)
        return bool(errors) and errors[-1].failure is failure

    until(tried, "the quota to be in force")
    return errors[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod", r"expected apiVersion v1, kind Pod in .*, got \(None, 'Pod'\)"),
        ("[1]", "expected apiVersion v1, kind Pod in .*, got list"),
        ("{", "expected a pod in YAML"),
        (
            "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: main}]}",
            r"expected a container of .* \(main\), got worker",
        ),
        ("apiVersion: v1\nkind: Pod", "expected a pod with containers in .*: KeyError: 'spec'"),
        ("apiVersion: v1\nkind: Pod\nspec: {containers: 3}", "expected a pod with containers in .*: TypeError"),
        (
            "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: worker, env: [3]}]}",
            "containers in .*: AttributeError",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: 3\nspec: {containers: [{name: worker}]}",
            "containers in .*: TypeError",
        ),
    ],
)
def test_a_template_that_is_no_workers_pod_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        pod_template(tmp_path / "pod.yaml", KubernetesFleetConfig(kind="kubernetes", pod_template="pod.yaml"))


def test_access_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.kubeconfig: expected access to a cluster"):
        connect(job(tmp_path, tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"fleet\.cluster: expected a name that ends in a letter or digit"):
        connect(job(tmp_path, tmp_path / "missing", cluster="digits-"))
