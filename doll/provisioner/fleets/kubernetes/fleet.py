"""`Fleet` of bare pods on Kubernetes. Outside the API server, it only stores the pods that recently disappeared there.

A launch whose answer was lost is identified by its name. Reads are consistent (a list without a resource version), so a
deletion is visible at once. The scheduler chooses the node, so there is one pool, which an order cannot avoid. The
fleet needs these rights: create, get, list and delete pods of one namespace. If the job file names a ConfigMap as the
owner of the pods, the fleet also needs the right to get this ConfigMap.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
import yaml

from doll import telemetry
from doll.config import JobConfig, KubernetesFleetConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.extras import lacking
from doll.provisioner.fleets.kubernetes import gangs, pods
from doll.provisioner.fleets.orders import LaunchGate
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market
from doll.records.bounded import MalformedError, check_size, json_object, short

log = telemetry.get_logger(__name__)

ENDED_KEPT_S: Final = 3600.0
_PAGE: Final = 500  # pods of a listing
_CONNECT_S: Final = 5.0


class ApiError(Exception):
    """The API server refused a call with an HTTP status, or did not answer (status 0)."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.status = status
        self.message = message

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later without any change."""
        return self.status in (0, 408, 429) or self.status >= 500


class PodApi:
    """The calls of the API server that the fleet needs, in plain JSON, so that a template may use any field of this
    server. `settings` is the Python client's `Configuration`: it has address, certificates and token, and renews the
    token."""

    def __init__(self, settings: Any, namespace: str, timeout_s: float) -> None:
        self._settings = settings
        self.namespace = namespace
        self._timeout = urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s)
        options: dict[str, Any] = {
            "ca_certs": settings.ssl_ca_cert, "cert_file": settings.cert_file, "key_file": settings.key_file,
            "cert_reqs": "CERT_REQUIRED" if settings.verify_ssl else "CERT_NONE", "retries": False,
        }  # fmt: skip
        if settings.tls_server_name:
            options["server_hostname"] = settings.tls_server_name
        self._http = (
            urllib3.ProxyManager(settings.proxy, **options) if settings.proxy else urllib3.PoolManager(**options)
        )

    def create(self, manifest: Mapping[str, Any]) -> pods.Pod:
        return self._call("POST", "pods", body=manifest)

    def read(self, name: str) -> pods.Pod:
        return self._call("GET", f"pods/{name}")

    def list(self, selector: str) -> list[pods.Pod]:
        """Return all pods with these labels; reads them in pages."""
        listed: list[pods.Pod] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            page = self._call("GET", "pods", query)
            listed.extend(page["items"])
            token = page.get("metadata", {}).get("continue")
            if not token:
                return listed
            query["continue"] = token

    def delete(self, name: str) -> None:
        """Request the end of the pod, with the grace period of its template. A missing pod causes no error."""
        try:
            self._call("DELETE", f"pods/{name}")
        except ApiError as error:
            if error.status != 404:
                raise

    def uid_of_config_map(self, name: str) -> str:
        return str(self._call("GET", f"configmaps/{name}")["metadata"]["uid"])

    def close(self) -> None:
        self._http.clear()

    def _call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        at = f"/api/v1/namespaces/{self.namespace}/{path}"
        return self.ask(method, at, query, body, what=f"{method} {path} in namespace {self.namespace}")

    def ask(
        self,
        method: str,
        at: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        what: str = "",
    ) -> dict[str, Any]:
        """Return the answer to a call of any path; `what` names the call in errors. Raises ApiError if the API server
        refuses the call, or does not answer."""
        what, url = what or f"{method} {at}", f"{self._settings.host}{at}"
        try:
            headers = {each["key"]: each["value"] for each in self._settings.auth_settings().values()}
        except Exception as error:  # a program that the kubeconfig names renews the token
            raise ApiError(what, 0, f"there is no token: {short(error)}") from error
        try:
            status, data = self._send(method, f"{url}?{urlencode(query)}" if query else url, headers, body)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(what, 0, f"the API server does not answer: {short(error)}") from error
        try:
            answer = json_object(data)
        except MalformedError as error:
            if status < 400:
                raise ApiError(what, 0, f"expected a JSON object from the API server: {error}") from error
            answer = {}
        if status >= 400:
            raise ApiError(what, status, str(answer.get("message") or f"HTTP status {status}"))
        return answer

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        answer = self._http.request(method, url, body=data, headers=sent, timeout=self._timeout)
        return answer.status, answer.data


@dataclass(eq=False, repr=False)
class KubernetesFleet:
    """The pods in one namespace that have the labels of the cluster and of the job. Pods of another job are not
    touched. Pods of an earlier release have no job label, and count as pods of the job.

    `template` is the worker's pod, see `pod_template`, and `stage_template` that of a stage, if workers are gangs.
    `clock` returns Unix seconds of the API server's clock.
    """

    api: PodApi
    _: KW_ONLY
    cluster: str
    job: str = ""
    template: pods.Pod
    settings: KubernetesFleetConfig
    stage_template: pods.Pod | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._known: dict[str, Instance] = {}
        self._gate = LaunchGate(pods.POOL, f"correct {self.settings.pod_template}", self.clock)
        self._owner_uid = ""

    def launch(self, order: Order) -> Instance:
        name = pods.name_of(order, self.cluster)
        try:
            pod = self._existing(name)
            if pod is not None:
                members = self.api.list(f"{gangs.GANG}={name}") or [pod]
            else:
                self._gate.check(order, name)
                members = self._created(order, name)
        except ApiError as error:
            raise LaunchError(
                f"{name}: {error}", failure=_failure(error, order.market), code=str(error.status)
            ) from error
        instance = self._instance(members)
        if instance is None or any(self._is_foreign(each) for each in members):
            self._undo(members)
            raise LaunchError(
                f"{name}: a pod of this name is there, which is no worker of cluster {self.cluster}: delete it, or "
                "choose another fleet.cluster",
                failure=LaunchFailure.CONFIG,
            )
        self._known[instance.id] = instance
        return instance

    def instances(self) -> Sequence[Instance]:
        """Return the instances. Pods that get no node, cannot start, or ended an hour ago are deleted, and so are the
        other pods of a gang when one of them has ended or was never created."""
        try:
            workers, now_s = self._workers(), self.clock()
            seen = {instance.id: instance for _, instance in workers} | self._given_back(workers, now_s)
            for members, instance in workers:
                if instance.machines > 1 and not seen[instance.id].is_alive:
                    self._delete(pod for pod in members if _runs(pod))
            for id_, known in list(self._known.items()):
                if id_ not in seen:
                    self._known[id_] = pods.vanished(known, now_s)
            self._known.update(seen)
            listed = {instance.id: members for members, instance in workers}
            for id_, known in list(self._known.items()):
                if known.ended_s is not None and now_s - known.ended_s > ENDED_KEPT_S:
                    del self._known[id_]
                    self._delete(listed.get(id_, ()))
        except ApiError as error:
            raise _unusable(error) from error
        return list(self._known.values())

    def terminate(self, ids: Collection[str]) -> None:
        """Send SIGTERM to each pod, which then has the grace period of its template; delete a pod that has ended."""
        if not ids:
            return
        try:
            for members, instance in self._workers():
                if instance.id not in ids or instance.state is InstanceState.ENDING:
                    continue
                self._delete(members)
                if instance.is_alive and not any(pod["spec"].get("nodeName") for pod in members):
                    # Without a node it has cost nothing.
                    self._known[instance.id] = instance.ended(self.clock(), EndReason.TERMINATED)
                elif instance.is_alive and instance.notice_s is None:  # it may disappear before the next listing
                    self._known[instance.id] = replace(instance, state=InstanceState.ENDING)
        except ApiError as error:
            raise _unusable(error) from error

    def close(self) -> None:
        self.api.close()

    def _workers(self) -> list[tuple[list[pods.Pod], Instance]]:
        """Return the job's instances, each with its pods."""
        members: dict[str, list[pods.Pod]] = {}
        for pod in self.api.list(f"{pods.LABELS.cluster}={self.cluster}"):
            if not self._is_foreign(pod):
                members.setdefault(gangs.gang_name(pod), []).append(pod)
        own = [(each, self._instance(each)) for each in members.values()]
        return [(each, instance) for each, instance in own if instance is not None]

    def _delete(self, members: Iterable[pods.Pod]) -> None:
        for pod in members:
            self.api.delete(pod["metadata"]["name"])

    def _existing(self, name: str) -> pods.Pod | None:
        try:
            return self.api.read(name)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def _created(self, order: Order, name: str) -> list[pods.Pod]:
        """Create the pods of an order: all or none. After an error that may pass, the same order completes the gang,
        or `instances` deletes it."""
        if self.settings.owner is not None and not self._owner_uid:
            self._owner_uid = self.api.uid_of_config_map(self.settings.owner)
        made: list[pods.Pod] = []
        try:
            for manifest in self._manifests(order, name):
                made.append(self._create(manifest))
        except ApiError as error:
            if not error.may_pass:
                self._undo(made)
            raise
        log.info("launched", id=name, worker=order.slot, incarnation=order.incarnation, market=order.market)
        return made

    def _undo(self, members: Iterable[pods.Pod]) -> None:
        """Delete the pods of a gang that is not complete. What cannot be deleted now, `instances` deletes."""
        with contextlib.suppress(ApiError):
            self._delete(pod for pod in members if gangs.machines_of(pod) > 1 and not self._is_foreign(pod))

    def _manifests(self, order: Order, name: str) -> list[dict[str, Any]]:
        """Return the pods of an order, that of the worker last."""

        def manifest(template: pods.Pod) -> dict[str, Any]:
            return pods.manifest(order, template, self.settings, self.cluster, self.job, self._owner_uid)

        if order.machines == 1:
            return [manifest(self.template)]
        assert self.stage_template is not None
        made = [manifest(self.stage_template) for _ in range(order.machines - 1)]
        for stage, pod in enumerate(made):
            gangs.add_to_gang(pod, name, order.machines, self.settings.container, stage)
        made.append(manifest(self.template))
        gangs.add_to_gang(made[-1], name, order.machines, self.settings.container)
        return made

    def _create(self, manifest: Mapping[str, Any]) -> pods.Pod:
        try:
            return self.api.create(manifest)
        except ApiError as error:
            if error.status != 409 or "already exists" not in error.message:
                raise
            return self.api.read(manifest["metadata"]["name"])  # another call of the same order was faster

    def _given_back(self, workers: Sequence[tuple[list[pods.Pod], Instance]], now_s: float) -> dict[str, Instance]:
        """Delete the pods that have waited too long for a node or for their start, and return their instances.

        If a pod has no node, its market counts as without capacity. A pod that cannot start is deleted because it
        occupies a node, whose kubelet would try again without end. If no pod of the job runs, further pods would not
        start either.
        """
        given, timeout_s = dict[str, Instance](), self.settings.node_timeout_s
        if any(instance.state is InstanceState.RUNNING for _, instance in workers):
            self._gate.started()
        for members, instance in workers:
            if not instance.is_alive:
                continue
            waiting = min(members, key=lambda pod: pods.unschedulable_since_s(pod) or now_s)
            waits_s = now_s - (pods.unschedulable_since_s(waiting) or now_s)
            if waits_s >= timeout_s:
                why = pods.why_it_waits(waiting)
                self._gate.found_no_node(instance.market, why)
                reason, event = EndReason.TERMINATED, "no_node"
            elif instance.trouble and now_s - (instance.costs_from_s or instance.launched_s) >= timeout_s:
                why, reason, event = instance.trouble, EndReason.FAILED, "does_not_start"
                self._gate.start_failed(why)
            else:
                continue
            self._delete(members)
            given[instance.id] = instance.ended(now_s, reason)
            log.warning(event, id=instance.id, market=instance.market, why=why)
        return given

    def _instance(self, members: Sequence[pods.Pod]) -> Instance | None:
        """Return the instance of a pod, or of the pods of a gang."""
        now_s = self.clock()
        try:
            name, machines = gangs.gang_name(members[0]), gangs.machines_of(members[0])
            each = [instance for pod in members if (instance := pods.instance_of(pod, now_s)) is not None]
            lost_stage = gangs.has_lost_stage(members)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ApiError("read pods", 0, f"expected a pod, got one without {short(error)}") from error
        if len(each) < len(members):
            log.warning("invalid_worker_tags", id=name, cluster=self.cluster)
            return None
        if (known := self._known.get(name)) is not None and known.state is InstanceState.ENDED:
            return known  # an ended pod does not change
        if machines == 1:
            return each[0]
        return gangs.as_one(name, machines, each, known, now_s, lost_stage=lost_stage)

    def _is_foreign(self, pod: pods.Pod) -> bool:
        labels = pod["metadata"].get("labels", {})
        own = (labels.get(pods.LABELS.cluster), labels.get(pods.LABELS.job, self.job))
        return own != (self.cluster, self.job)


def connect(config: JobConfig) -> KubernetesFleet:
    """Return the fleet of a job file. Raises ConfigError, see `connect_api`."""
    api, template = connect_api(config)
    assert isinstance(config.fleet, KubernetesFleetConfig)
    return KubernetesFleet(
        api, cluster=config.cluster, job=config.job, template=template, settings=config.fleet,
        stage_template=stage_template(config, config.fleet),
    )  # fmt: skip


def connect_api(config: JobConfig) -> tuple[PodApi, pods.Pod]:
    """Return the cluster of a job file, with the rights of the current user (a kubeconfig's user, or the pod's service
    account), and the worker's pod.

    Raises:
        ConfigError: the fleet is of another kind, the client library or the cluster is missing, or the template is not
            that of a worker.
    """
    settings = config.fleet
    if not isinstance(settings, KubernetesFleetConfig):
        raise ConfigError(f"fleet.kind: expected kubernetes, got {settings.kind}")
    for key, name in (("fleet.cluster", config.cluster), ("job", config.job)):
        if not name[-1].isalnum():
            raise ConfigError(
                f"{key}: expected a name that ends in a letter or digit, as labels of Kubernetes do, got {name!r}"
            )
    template = pod_template(config.path(settings.pod_template), settings)
    stage_template(config, settings)
    try:
        from kubernetes import client
        from kubernetes import config as access
    except ImportError as error:
        raise lacking("fleet.kind: kubernetes", "kubernetes") from error
    client_settings = client.Configuration()
    try:
        if settings.kubeconfig is None and settings.context is None and _NAMESPACE_FILE.exists():
            access.load_incluster_config(client_configuration=client_settings)
            namespace = _NAMESPACE_FILE.read_text(encoding="ascii").strip()
        else:
            file = str(config.path(settings.kubeconfig)) if settings.kubeconfig else None
            access.load_kube_config(file, settings.context, client_configuration=client_settings)
            contexts, active = access.list_kube_config_contexts(file)
            used = next((each for each in contexts if each["name"] == settings.context), active)
            namespace = used["context"].get("namespace", "default")
    except (access.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"fleet.kubeconfig: expected access to a cluster: {short(error)}") from error
    return PodApi(client_settings, settings.namespace or namespace, settings.timeout_s), template


_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def pod_template(file: Path, settings: KubernetesFleetConfig, key: str = "fleet.pod_template") -> pods.Pod:
    """Return the pod in the YAML file that `key` names. Raises ConfigError if the file does not exist, is not a pod, or
    has no container `settings.container`."""
    try:
        pod = yaml.safe_load(file.read_text(encoding="utf-8"))
        check_size(pod)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, MalformedError) as error:
        raise ConfigError(f"{key}: expected a pod in YAML, got {file}: {short(error)}") from error
    kind = (pod.get("apiVersion"), pod.get("kind")) if isinstance(pod, dict) else type(pod).__name__
    if kind != ("v1", "Pod"):
        raise ConfigError(f"{key}: expected apiVersion v1, kind Pod in {file}, got {kind}")
    try:
        names = [each["name"] for each in pod["spec"]["containers"]]
        if settings.container in names:
            pods.manifest(Order(0, 1, "spot"), pod, settings, "any")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {short(error)}"
        raise ConfigError(f"{key}: expected a pod with containers in {file}: {why}") from error
    if settings.container not in names:
        raise ConfigError(
            f"fleet.container: expected a container of {file} ({', '.join(map(str, names))}), got {settings.container}"
        )
    return dict(pod)


def stage_template(config: JobConfig, settings: KubernetesFleetConfig) -> pods.Pod | None:
    """Return the pod of a stage; None if workers are no gangs. Raises ConfigError as `pod_template`, or if the job file
    names none."""
    if config.machines_per_worker == 1:
        return None
    if settings.stage_template is None:
        raise ConfigError(
            "fleet.stage_template: expected with worker.pipeline.remote the pod of a stage, which runs `doll stage`, "
            "got none"
        )
    return pod_template(config.path(settings.stage_template), settings, "fleet.stage_template")


def _runs(pod: pods.Pod) -> bool:
    """Return whether a pod has neither ended nor been deleted."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def _failure(error: ApiError, market: Market) -> LaunchFailure:
    if error.may_pass:
        return LaunchFailure.THROTTLED
    if error.status == 403 and "exceeded quota" in error.message:
        return LaunchFailure.SPOT_QUOTA if market == "spot" else LaunchFailure.ON_DEMAND_QUOTA
    return LaunchFailure.CONFIG


def _unusable(error: ApiError) -> ConfigError | ServiceUnavailableError:
    return (ServiceUnavailableError if error.may_pass else ConfigError)(str(error))
