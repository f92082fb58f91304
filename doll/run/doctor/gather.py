"""Asks the services of a job, and judges the answers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from doll.config.fleets import Ec2FleetConfig, KubernetesFleetConfig, RayFleetConfig
from doll.config.format import AvroFormat
from doll.errors import ConfigError, DollError
from doll.kafka.diagnosis import ask_kafka
from doll.kafka.logins import client_certificate, principal_text
from doll.kafka.permissions import ROLES, Role
from doll.local import ray_head
from doll.provisioner.fleets.ec2.quotas import ask_quotas
from doll.provisioner.fleets.findings import Finding
from doll.provisioner.fleets.kubernetes.diagnosis import ask_kubernetes
from doll.provisioner.fleets.ray.diagnosis import ask_ray
from doll.run.doctor.checks import (
    StoreFacts,
    check_addresses,
    check_fleet,
    check_kafka,
    check_own_certificate,
    check_quotas,
    check_redis,
    check_registry,
    check_store,
    check_tcp,
    check_unasked,
    needs_redis,
)
from doll.run.doctor.network import ask_address, environment_authority, tcp_settings, tls_context
from doll.run.doctor.report import Check, Report
from doll.services import KAFKA_CA_ENV, REDIS_CA_ENV, REDIS_ENV, parse_redis
from doll.storage.redis_diagnosis import ask_redis
from doll.storage.stores import checkpoint_location, open_store

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.run.target import Target
    from doll.services import Services

_MAX_BROKERS: Final = 30


def examine(target: Target, roles: Sequence[Role] = ROLES) -> Report:
    """The report of a job for these roles, with the credentials of this process. Nothing is changed: only a probe key
    is written to Redis, and deleted.

    Raises:
        ConfigError: an address is missing.
    """
    services = target.services(needs_redis=False)
    checks = [*_kafka(target.config, services, roles)]
    if needs_redis(roles):
        checks += _redis(target.config, services)
    if "worker" in roles and isinstance(section := target.config.data.format, AvroFormat):
        checks += _schemas(section, target.config)
    if "server" in roles or "evaluator" in roles:
        checks += check_store(_ask_store(target.config, target.run.path))
    if "provisioner" in roles and isinstance(target.config.fleet, Ec2FleetConfig):
        checks += check_quotas(ask_quotas(target.config))
    if "provisioner" in roles:
        checks += check_fleet(_ask_fleet(target.config))
    return Report(target.config.job, checks)


def _ask_fleet(config: JobConfig) -> Sequence[Finding]:
    """What the owner of the workers' machines says, where there is one."""
    match config.fleet:
        case KubernetesFleetConfig():
            return ask_kubernetes(config)
        case RayFleetConfig(address="auto") if ray_head.unavailable_reason() is None and not ray_head.running_address():
            return [
                Finding(
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
        """Look at what the brokers advertise; whether a client can go on to one of these places."""
        places = [f"{host}:{port}" for host, port in brokers]
        others = [address for address in places if address not in bootstrap][:_MAX_BROKERS]
        advertised.extend(_addresses("Kafka", others, authority_env, advertised_by=services.kafka))
        if 0 < len(others) == len(places) and all(check.result == "failed" for check in advertised):
            unasked.append(check_unasked(services.kafka, places))
        return not unasked

    try:
        certificate = client_certificate() if is_tls else None
        left_s = None if certificate is None else certificate.not_valid_after_utc.timestamp() - time.time()
        yield from check_own_certificate(left_s)
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
    """
    Args:
        authority_env: variable of the authority's certificates; None: without TLS.
        advertised_by: as of `check_addresses`.
    """
    context = None
    if authority_env is not None:
        try:
            context = tls_context(environment_authority(authority_env))
        except OSError as exc:
            yield Check(f"{service}: {authority_env}", "failed", f"cannot be read: {exc.strerror or exc}",
                        "set it to a PEM file of certificates")  # fmt: skip
    facts = [ask_address(address, context) for address in addresses]
    yield from check_addresses(service, facts, advertised_by=advertised_by)


def _redis(config: JobConfig, services: Services) -> Iterator[Check]:
    if not services.redis:
        yield Check(
            "Redis", "ok", "no address: doll up starts a Redis of its own; roles that are started without it need "
            f"redis.address in the job file, or ${REDIS_ENV}",
        )  # fmt: skip
        return
    place = parse_redis(services.redis)
    assert place is not None, "it was read with the job"
    addresses = [f"{host}:{port}" for host, port in place.addresses]
    yield from _addresses("Redis", addresses, REDIS_CA_ENV if place.tls else None)
    facts = ask_redis(services, config.job)
    yield from check_redis(facts, facts.asked_s)
    yield from check_tcp(facts.latency_s, tcp_settings())


def _schemas(section: AvroFormat, config: JobConfig) -> Iterator[Check]:
    """What decodes the stream's Avro records."""
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
        yield from check_registry(ask_registry(section))


def _ask_store(config: JobConfig, run_folder: Path) -> StoreFacts:
    location = checkpoint_location(config, run_folder)
    try:
        versions = len(open_store(config, run_folder).versions())
    except DollError as exc:
        return StoreFacts(str(location), problem=str(exc))
    if not isinstance(location, Path):
        return StoreFacts(location, versions=versions, is_tried=False)
    parent = next(path for path in (location, *location.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return StoreFacts(str(location), problem=f"{parent} cannot be written by this user")
    return StoreFacts(str(location), versions=versions, free_bytes=shutil.disk_usage(parent).free)
