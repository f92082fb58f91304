"""Selects the checks of `doll doctor` for each role, and asks the services of a job. `answers` judges what they say."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from doll.config import JobConfig
from doll.config.fleets import Ec2FleetConfig, KubernetesFleetConfig, LambdaFleetConfig, RayFleetConfig
from doll.config.format import AvroFormat
from doll.errors import ConfigError, DollError
from doll.extras import is_installed, require
from doll.formats import require_format
from doll.kafka.diagnosis import ask_kafka
from doll.kafka.logins import client_certificate, principal_text
from doll.kafka.permissions import ROLES, Role
from doll.local import ray_head
from doll.provisioner.fleets.aws_lambda.account import ask_function
from doll.provisioner.fleets.ec2.account import ask_quotas
from doll.provisioner.fleets.kubernetes.diagnosis import ask_kubernetes
from doll.provisioner.fleets.ray.diagnosis import ask_ray
from doll.records.check import Check
from doll.run.doctor.answers import (
    DoctorReport,
    check_certificate,
    check_kafka,
    check_redis,
    check_tcp,
    check_unasked,
)
from doll.run.doctor.network import ask_address, tcp_settings, tls_context
from doll.run.target import Target
from doll.services import KAFKA_CA_ENV, REDIS_CA_ENV, REDIS_ENV, Services, parse_redis, shard_addresses
from doll.storage.redis_diagnosis import ask_redis
from doll.storage.stores import checkpoint_location, open_store

_MAX_BROKERS: Final = 30
_WITH_REDIS: Final = frozenset({"worker", "server", "evaluator"})


def examine(target: Target, roles: Sequence[Role] = ROLES) -> DoctorReport:
    """Return the report of a job for these roles, with the credentials of this process. Nothing is changed, except that
    a probe key is written to Redis and deleted again.

    Raises:
        ConfigError: an address is missing.
    """
    services = target.services(needs_redis=False)
    checks = [*_kafka(target.config, services, roles)]
    if not _WITH_REDIS.isdisjoint(roles):
        checks += _redis(target.config, services)
    if "joiner" in roles and (target.config.data.join is not None or len(roles) == 1):
        checks.append(_join(target.config))
    if "worker" in roles and isinstance(section := target.config.data.format, AvroFormat):
        checks += _schemas(section, target.config)
    if "server" in roles or "evaluator" in roles:
        checks.append(_store(target.config, target.run.path))
    if "provisioner" in roles and isinstance(target.config.fleet, Ec2FleetConfig):
        checks += ask_quotas(target.config)
    if "provisioner" in roles:
        checks += [replace(check, name=f"provisioner: {check.name}") for check in _fleet(target.config)]
    return DoctorReport(target.config.job, checks)


def _fleet(config: JobConfig) -> Sequence[Check]:
    """Return the checks of the service that provides the workers' machines, if there is one."""
    match config.fleet:
        case KubernetesFleetConfig():
            return ask_kubernetes(config)
        case LambdaFleetConfig():
            return ask_function(config)
        case RayFleetConfig(address="auto") if is_installed("ray") and not ray_head.running_address():
            return [
                Check(
                    "Ray", "warning", "this machine is a node of no cluster; doll up starts a Ray of its own",
                    "for doll provision: `ray start --head`, or run it on a node of the cluster (ray job submit)",
                )
            ]  # fmt: skip
        case RayFleetConfig():
            return ask_ray(config)
        case _:
            return []


def _kafka(config: JobConfig, services: Services, roles: Sequence[Role]) -> Iterator[Check]:
    is_tls = config.kafka.security.endswith("ssl")
    bootstrap = services.kafka.split(",")
    authority_env = KAFKA_CA_ENV if is_tls else None
    yield from _addresses("Kafka", bootstrap, authority_env)
    advertised: list[Check] = []
    unasked: list[Check] = []

    def goes_on(brokers: Sequence[tuple[str, int]]) -> bool:
        """Check the addresses that the brokers advertise; return whether a client can connect to one of them."""
        places = [f"{host}:{port}" for host, port in brokers]
        others = [address for address in places if address not in bootstrap][:_MAX_BROKERS]
        advertised.extend(_addresses("Kafka", others, authority_env, advertised_by=services.kafka))
        if 0 < len(others) == len(places) and all(check.result == "failed" for check in advertised):
            unasked.append(check_unasked(services.kafka, places))
        return not unasked

    try:
        certificate = client_certificate() if is_tls else None
        if certificate is not None:
            left_s = certificate.not_valid_after_utc.timestamp() - time.time()
            yield check_certificate("Kafka: our certificate (DOLL_KAFKA_CERT)", left_s)
        facts = ask_kafka(config, services, goes_on=goes_on)
        if config.data.asks_kafka and (count := facts.partitions.get(config.topic("samples"))) is not None:
            config = config.model_copy(update={"data": config.data.model_copy(update={"partitions": count})})
        principal = principal_text(config.kafka)
    except ConfigError as exc:
        yield Check("Kafka: log in", "failed", str(exc))
        return
    yield from advertised
    yield from unasked or check_kafka(config, facts, roles, principal, time.time())


def _addresses(
    service: str, addresses: Sequence[str], authority_env: str | None, *, advertised_by: str = ""
) -> Iterator[Check]:
    """Yield the checks of these addresses.

    Args:
        authority_env: environment variable with the CA certificates. None: without TLS.
        advertised_by: see `ask_address`.
    """
    context = None
    if authority_env is not None:
        try:
            context = tls_context(os.environ.get(authority_env) or None)
        except OSError as exc:
            yield Check(f"{service}: {authority_env}", "failed", f"cannot be read: {exc.strerror or exc}",
                        "set it to a PEM file of certificates")  # fmt: skip
    for address in addresses:
        yield from ask_address(service, address, context, advertised_by=advertised_by)


def _redis(config: JobConfig, services: Services) -> Iterator[Check]:
    if services.redis:
        yield from _redis_server(config, services)
    else:
        yield Check(
            "Redis", "ok", "no address: doll up starts a Redis of its own; roles that are started without it need "
            f"redis.address in the job file, or ${REDIS_ENV}",
        )  # fmt: skip
    for shard, url in enumerate(shard_addresses(config)):
        for check in _redis_server(config, replace(services, redis=url)):
            yield replace(check, name=check.name.replace("Redis", f"Redis of shard {shard}", 1))


def _redis_server(config: JobConfig, services: Services) -> Iterator[Check]:
    place = parse_redis(services.redis)
    assert place is not None, "it was read with the job"
    addresses = [f"{host}:{port}" for host, port in place.addresses]
    yield from _addresses("Redis", addresses, REDIS_CA_ENV if place.tls else None)
    facts = ask_redis(services, config.job)
    yield from check_redis(facts, facts.asked_s)
    yield from check_tcp(facts.latency_s, tcp_settings())


def _join(config: JobConfig) -> Check:
    name = "joiner: data.join"
    if config.data.join is None:
        return Check(name, "failed", "the job file has no data.join: there is nothing to join")
    try:
        require("data.join", "join")
    except ConfigError as exc:
        return Check(name, "failed", str(exc), "install it where a joiner runs")
    return Check(name, "ok", f"joiners: {config.data.join.joiners} with doll up or the chart, 1 with compose")


def _schemas(section: AvroFormat, config: JobConfig) -> Iterator[Check]:
    """Yield the checks of the decoder of the stream's Avro records."""
    try:
        require_format(section)
    except ConfigError as exc:
        yield Check("worker: data.format", "failed", str(exc), "install it where a worker or an evaluator runs")
        return
    from doll.formats.registry import CA_ENV
    from doll.formats.registry_diagnosis import ask_registry, fields_of  # loads fastavro

    if section.registry is None:
        assert section.schema_file is not None
        name = f"worker: schema {section.schema_file}"
        try:
            yield Check(name, "ok", f"fields {', '.join(fields_of(config.path(section.schema_file)))}")
        except ConfigError as exc:
            yield Check(name, "failed", str(exc), "correct data.format.schema_file, or the file")
        return
    place = urlsplit(section.registry)
    is_tls = place.scheme == "https"
    has_port = place.netloc.rpartition(":")[2].isdigit()
    address = place.netloc if has_port else f"{place.netloc}:{443 if is_tls else 80}"
    connected = [*_addresses("Registry", [address], CA_ENV if is_tls else None)]
    yield from connected
    if all(check.result != "failed" for check in connected):
        yield from ask_registry(section)


def _store(config: JobConfig, run_folder: Path) -> Check:
    """Check that the checkpoint store can be read, and that the permissions of a folder allow writing. Nothing is
    written."""
    location = checkpoint_location(config, run_folder)
    name = f"server: checkpoints in {location}"
    try:
        count = len(open_store(config, run_folder).versions())
    except DollError as exc:
        network = "" if isinstance(location, Path) else ", or open the network of this host to it"
        return Check(name, "failed", str(exc), f"correct checkpoint.folder, or its permissions{network}")
    if not isinstance(location, Path):
        return Check(name, "ok", f"{count} checkpoints can be listed; to write was not tried",
                     "s3:PutObject and s3:DeleteObject must be allowed under the prefix")  # fmt: skip
    parent = next(path for path in (location, *location.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return Check(name, "failed", f"{parent} cannot be written by this user",
                     "correct checkpoint.folder, or its permissions")  # fmt: skip
    return Check(name, "ok", f"{count} checkpoints, {shutil.disk_usage(parent).free / 1e9:.1f} GB free")
