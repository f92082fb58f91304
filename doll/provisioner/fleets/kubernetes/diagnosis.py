"""Checks for `doll doctor` whether a job's provisioner can work on a Kubernetes cluster. They change nothing.

Reference: Kubernetes' SelfSubjectAccessReview (authorization.k8s.io/v1), "dry-run" of the API, and ResourceQuota.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from doll.config import JobConfig, KubernetesFleetConfig
from doll.errors import ConfigError
from doll.provisioner.fleets.kubernetes import pods
from doll.provisioner.fleets.kubernetes.fleet import ApiError, PodApi, connect_api, stage_template
from doll.provisioner.fleets.port import Order
from doll.provisioner.planning.state import Market
from doll.records.check import Check

_VERBS: Final = ("create", "get", "list", "delete")
_NAME: Final = "Kubernetes"


def ask_kubernetes(config: JobConfig) -> list[Check]:
    """Check access, rights, namespace, quota, nodes, and whether a worker's pod would be admitted."""
    try:
        api, template = connect_api(config)
    except ConfigError as error:
        return [Check(_NAME, "failed", str(error))]
    settings = config.fleet
    assert isinstance(settings, KubernetesFleetConfig)
    try:
        return [*_findings(config, settings, api, template)]
    finally:
        api.close()


def _findings(config: JobConfig, settings: KubernetesFleetConfig, api: PodApi, template: pods.Pod) -> Iterator[Check]:
    namespace = f"{_NAME}: namespace {api.namespace}"
    try:
        lacking = [verb for verb in _VERBS if not _may(api, verb, "pods")]
        if settings.owner is not None and not _may(api, "get", "configmaps", settings.owner):
            yield Check(
                f"{_NAME}: right to get configmap {settings.owner}", "failed", f"refused in {api.namespace}",
                _role("get", "configmaps", api.namespace),
            )  # fmt: skip
    except ApiError as error:
        yield Check(
            _NAME, "failed", str(error), "correct fleet.kubeconfig, its context or its log-in: kubectl auth whoami"
        )
        return
    if lacking:
        verbs = ",".join(lacking)
        yield Check(
            f"{_NAME}: rights on pods", "failed", f"refused in {api.namespace}: {verbs.replace(',', ', ')}",
            _role(verbs, "pods", api.namespace),
        )  # fmt: skip
    else:
        yield Check(f"{_NAME}: rights on pods", "ok", f"{', '.join(_VERBS)} in {api.namespace}")
    try:
        api.ask("GET", f"/api/v1/namespaces/{api.namespace}")
        yield Check(namespace, "ok")
    except ApiError as error:
        if error.status == 404:
            todo = f"kubectl create namespace {api.namespace}, or correct fleet.namespace"
            yield Check(namespace, "failed", "it does not exist", todo)
            return
        yield Check(namespace, "unknown", error.message)
    yield from _quotas(config, api)
    for market, placement in (("spot", settings.spot), ("on-demand", settings.on_demand)):
        yield _nodes(api, market, placement.node_selector)
    if "create" in lacking:
        return
    markets: tuple[Market, ...] = ("spot", "on_demand")
    for market in markets:
        yield _admitted(config, settings, api, template, market)
        if (of_stage := stage_template(config, settings)) is not None:
            yield _admitted(config, settings, api, of_stage, market, "a stage's", "stage_template")


def _may(api: PodApi, verb: str, resource: str, name: str = "") -> bool:
    attributes = {"namespace": api.namespace, "verb": verb, "resource": resource, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }  # fmt: skip
    answer = api.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
    return bool(answer["status"]["allowed"])


def _role(verbs: str, resource: str, namespace: str) -> str:
    return (
        f"kubectl create role doll-provisioner-{resource} --verb={verbs} --resource={resource} -n {namespace}, and "
        f"kubectl create rolebinding doll-provisioner-{resource} --role=doll-provisioner-{resource} -n {namespace} "
        "--serviceaccount=NAMESPACE:NAME (or --user=NAME)"
    )


def _quotas(config: JobConfig, api: PodApi) -> Iterator[Check]:
    """Check the quotas of pods. The trial of a pod shows the quotas of processors and memory."""
    try:
        listed = api.ask("GET", f"/api/v1/namespaces/{api.namespace}/resourcequotas")["items"]
    except ApiError as error:
        yield Check(f"{_NAME}: quota of pods", "unknown", error.message)
        return
    for quota in listed:
        status: Mapping[str, Any] = quota.get("status", {})
        for key in ("pods", "count/pods"):
            hard, used = status.get("hard", {}).get(key), status.get("used", {}).get(key, "0")
            if hard is None or not (hard.isdecimal() and used.isdecimal()):
                continue
            name, left = f"{_NAME}: quota {quota['metadata']['name']}", int(hard) - int(used)
            needed = config.data.workers * config.machines_per_worker
            if left < needed:
                yield Check(
                    name, "warning", f"{left} of {hard} pods are left, the job's workers have {needed}",
                    "raise the quota, set fewer workers, or another fleet.namespace",
                )  # fmt: skip
            else:
                yield Check(name, "ok", f"{left} of {hard} pods are left")


def _nodes(api: PodApi, market: str, labels: Mapping[str, str]) -> Check:
    name = f"{_NAME}: nodes for {market}"
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    try:
        count = len(api.ask("GET", "/api/v1/nodes", {"labelSelector": selector, "limit": "500"})["items"])
    except ApiError as error:
        return Check(name, "unknown", error.message, f"a pod runs on nodes with {selector or 'any labels'}")
    if count:
        return Check(name, "ok", f"{count} with {selector or 'any labels'}")
    key = "fleet.spot" if market == "spot" else "fleet.on_demand"
    return Check(
        name,
        "warning",
        f"none has {selector} now",
        f"an autoscaler has to make some; else label nodes, or correct {key}",
    )


def _admitted(
    config: JobConfig,
    settings: KubernetesFleetConfig,
    api: PodApi,
    template: pods.Pod,
    market: Market,
    whose: str = "a worker's",
    key: str = "pod_template",
) -> Check:
    """Check whether the API server would admit a worker's or a stage's pod: quota, limits, security and template."""
    name = f"{_NAME}: {whose} pod, {market.replace('_', '-')}"
    manifest = pods.manifest(Order(0, 1, market, run="doctor"), template, settings, config.cluster, config.job)
    container = next(each for each in manifest["spec"]["containers"] if each["name"] == settings.container)
    image = container.get("image", "")
    try:
        api.ask("POST", f"/api/v1/namespaces/{api.namespace}/pods", {"dryRun": "All"}, manifest)
    except ApiError as error:
        return Check(name, "failed", error.message, f"correct fleet.{key}, the quota, or the namespace's policy")
    return Check(name, "ok", f"it would be admitted; whether nodes can pull {image} shows when the first one starts")
