"""Build the clients of Kafka from job file and environment: producers, consumers and admin clients. Translate errors of
the client library, so that they name a missing ACL and its user, or the limit that a record exceeds.

The clients of a job share `kafka_settings`: addresses, security, reconnection times. Secrets come from the environment.
Functions that make a client raise ConfigError if a secret is missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigEntry, OffsetSpec

from doll.errors import ConfigError, ServiceUnavailableError
from doll.kafka.logins import Renewal, has_expired_certificate, login_settings, principal_text, unreadable_files
from doll.kafka.permissions import Permission, Resource, allow_command
from doll.kafka.remedies import is_final, login_remedy
from doll.kafka.topic_plan import RECORD_LIMIT_BYTES, SIZE_SETTING, alter_command
from doll.services import KAFKA_ENV, Services
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.config.connections import KafkaConfig

log = get_logger(__name__)

T = TypeVar("T")

ADMIN_S: Final = 15.0  # maximum wait for an answer to an admin client
_NEW_TOPIC_S: Final = 10.0
_RESOURCES: Final[dict[int, Resource]] = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional-id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}
_ASK_S: Final = 10.0
_BUSY_TIMES: Final = 4
# Answers of brokers about a topic that has just been created.
_LEADERLESS: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,  # the client knows the leader before the broker itself does
)
_AWAY: Final = (KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT)
# The wait of control records, so that records that are sent together (the grants of a group, an announcement and a
# push) share one request. A request costs the broker more than this wait costs a round of the job.
LINGER_MS: Final = 0.5
# At level 3 librdkafka writes a line each 50 ms while a broker is unreachable; `error_cb` reports it once instead.
_LIBRDKAFKA_CRITICAL: Final = 2
# librdkafka's and confluent-kafka's few settings that are written with an underscore.
_UNDERSCORED: Final = frozenset({"log_level", "on_commit", "on_delivery"})
_SECRET: Final = ("password", "secret", ".pem")  # parts of the names of secret settings
# Error codes with which librdkafka reports a refused login.
_LOG_IN_CODES: Final = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL})
_REPEAT_AFTER_S: Final = 30.0
_METADATA_WAIT_S: Final = 0.5


def error_of(exc: KafkaException) -> KafkaError:
    """Return the error that an exception contains."""
    return exc.args[0]


def is_away(error: ServiceUnavailableError) -> bool:
    """Return whether the broker has not answered, so that waiting may help."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and error_of(cause).code() in _AWAY


def is_denial(error: Any) -> bool:
    """Return whether an error of the client library is a missing permission."""
    return error.code() in _RESOURCES


def reason_of(error: Any, kafka: KafkaConfig, operation: str, name: str) -> str:
    """Return the library's message for an error. For a missing permission, add three facts: its name (`operation`, as
    in ACLs, on the topic, group or transactional id `name`), the user that lacks it, and how to grant it. For a record
    that is too long, add the limit to raise."""
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        change = alter_command(name, f"{SIZE_SETTING}={RECORD_LIMIT_BYTES}")
        return f"{error.str()}: raise the topic's limit: {change}"
    if not is_denial(error):
        return str(error.str())
    return f"{error.str()}: {_lacks(kafka, Permission(_RESOURCES[error.code()], name, operation))}"


def describe_denial(admin: AdminClient, kafka: KafkaConfig, name: str) -> str | None:
    """Return the permission that this user lacks to see a topic; None if the user may see it, or Kafka does not say."""
    futures = admin.describe_topics(TopicCollection([name]), request_timeout=_ASK_S)
    try:
        futures[name].result(_ASK_S)
    except KafkaException as exc:
        return _lacks(kafka, Permission("topic", name, "Describe")) if is_denial(error_of(exc)) else None
    except TimeoutError:
        return None
    return None


def _lacks(kafka: KafkaConfig, permission: Permission) -> str:
    principal = principal_text(kafka)
    return f"{principal} lacks {permission}; {allow_command([permission], principal)}"


@contextlib.contextmanager
def translate_errors(address: str, what: str, hint: str = "is it running, and the address right?") -> Iterator[None]:
    """Within the context, raise ServiceUnavailableError instead of KafkaException: `Kafka at ADDRESS does not WHAT
    (reason): HINT`."""
    try:
        yield
    except KafkaException as exc:
        error = error_of(exc)
        todo = "doll doctor says which permission is missing" if is_denial(error) else hint
        raise ServiceUnavailableError(f"Kafka at {address} does not {what} ({error.str()}): {todo}") from exc


def retry_while_leaderless(call: Callable[[], T], timeout_s: float = _NEW_TOPIC_S) -> T:
    """Return the result of `call`, which is repeated while a topic that was just created has no leader yet. Raise any
    other KafkaException."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as exc:
            if error_of(exc).code() not in _LEADERLESS or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def list_offsets(
    admin: AdminClient, partitions: Iterable[TopicPartition], spec: OffsetSpec
) -> dict[tuple[str, int], int]:
    """Return the offset that `spec` describes, by topic and partition. Raise KafkaException if one is unknown."""
    if not (wanted := dict.fromkeys(partitions, spec)):
        return {}
    futures = admin.list_offsets(wanted, request_timeout=ADMIN_S)
    return {(where.topic, where.partition): future.result().offset for where, future in futures.items()}


def setting_values(entries: Mapping[str, ConfigEntry]) -> dict[str, str]:
    """Return the settings that have a value, by name, from an answer of `describe_configs`."""
    return {key: str(entry.value) for key, entry in entries.items() if entry.value is not None}


class _JobProducer(Producer):  # type: ignore[misc]
    """A producer that allows weak references, unlike the library's class."""


class _JobConsumer(Consumer):  # type: ignore[misc]
    """A consumer that allows weak references (see `_JobProducer`)."""


def make_producer(config: JobConfig, services: Services, **extra: Any) -> Producer:
    """Return a producer whose records are acknowledged by all in-sync replicas, stay in order and never repeat."""
    return _make(_JobProducer, config, services, {"acks": "all", "enable_idempotence": True, **extra})


def make_consumer(config: JobConfig, services: Services, purpose: str, **extra: Any) -> Consumer:
    """Return a consumer for explicit positions (`assign`). It joins no group and commits nothing.

    `purpose` is a part of its group id, which librdkafka requires even if no group is joined.
    """
    defaults = {
        "group_id": f"doll.{config.job}.{purpose}",
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",  # retention may have deleted the next record
    }
    return _make(_JobConsumer, config, services, {**defaults, **extra})


def make_admin(config: JobConfig, services: Services, **extra: Any) -> AdminClient:
    """Return a client for topics, settings and permissions."""
    return _make(AdminClient, config, services, extra)


def _make(kind: Callable[[Settings], Any], config: JobConfig, services: Services, extra: Mapping[str, Any]) -> Any:
    """Return a client of the job. Raise ConfigError if the environment lacks what its login needs, or a certificate or
    key cannot be used."""
    settings = kafka_settings(config, services, **extra)
    try:
        client = kind(settings)
    except KafkaException as exc:
        raise ConfigError(_unusable(exc)) from None
    if client is not None:
        settings["error_cb"].attach(client)
    return client


def _unusable(exc: KafkaException) -> str:
    todo = "; ".join(unreadable_files()) or (
        "correct the certificates and keys that the environment names (docs/security.md)"
    )
    return f"Kafka's client cannot be made ({error_of(exc).str()}): {todo}"


def make_probe_client(kind: Callable[[dict[str, Any]], T], address: str, extra: Mapping[str, Any] = {}) -> T:
    """Return a client of the class `kind` for brokers that this machine starts. No job's settings apply: no security,
    and no log."""
    settings = {
        "bootstrap.servers": address,
        "log_level": 0,
        "reconnect.backoff.max.ms": 200,
        "error_cb": lambda error: None,
    }
    return kind({**settings, **extra})


class Settings(dict[str, Any]):
    """Settings of librdkafka whose repr hides secrets."""

    def __repr__(self) -> str:
        return repr({key: "***" if any(part in key for part in _SECRET) else value for key, value in self.items()})


def kafka_settings(config: JobConfig, services: Services, **extra: Any) -> Settings:
    """Return the librdkafka settings that every client of the job shares. Modules that make a client add their own:
    `chunk_reader` and `reader` for fetching, `publisher`, `producers.sender` and `serving.answer_log` for sending,
    `group_stream` for transactions.

    The arguments `extra` add or replace settings, with `_` for each `.`: `kafka_settings(config, services,
    group_id="g")`.

    While a broker is unreachable, the client logs one line in 30 seconds instead of one every 50 ms.
    """
    settings = Settings(
        {
            "bootstrap.servers": services.kafka,
            "log_level": _LIBRDKAFKA_CRITICAL,
            "error_cb": lambda error: None,
            "reconnect.backoff.max.ms": 1000,  # librdkafka's default of 10 s exceeds a broker's restart
            "retry.backoff.max.ms": 250,  # interval of requests for a new leader; 1 s would add to its election time
            **login_settings(config.kafka, services.kafka),
        }
    )
    own_report = extra.get("error_cb")
    for key, value in extra.items():
        settings[key if key.endswith("_cb") or key in _UNDERSCORED else key.replace("_", ".")] = value
    report = _LogErrorsOnce(services.kafka, config.kafka, own_report)
    settings["error_cb"] = Renewal(config.kafka, report)
    return settings


class _LogErrorsOnce:
    """An `error_cb` that logs each kind of error once in `_REPEAT_AFTER_S` seconds. It passes every error to `also`,
    which returns the errors that are not about the login."""

    def __init__(
        self,
        address: str,
        kafka: KafkaConfig,
        also: Callable[[Any], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._kafka = kafka
        self._also = also
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}

    def __call__(self, error: Any) -> None:
        remedy = _remedy(error.str(), self._kafka) if error.code() in _LOG_IN_CODES else None
        if self._also is not None:
            self._also(error)
            if remedy is None:
                return
        now = self._clock()
        kind = error.name()
        if now - self._logged_at_s.get(kind, float("-inf")) < _REPEAT_AFTER_S:
            return
        self._logged_at_s[kind] = now
        hint = {"hint": remedy} if remedy else {}
        log.warning("kafka_error", address=self._address, error=kind, reason=error.str(), **hint)


def _remedy(reason: str, kafka: KafkaConfig) -> str | None:
    return login_remedy(reason, kafka, expired=has_expired_certificate())


def kafka_problem(config: JobConfig, services: Services, timeout_s: float) -> str | None:
    """Return why Kafka does not send its metadata, and what to do; None if Kafka sends them. The function waits
    `timeout_s` for a broker that cannot be reached, and four times as long for one that is connected and silent. A
    broker needs this time on a machine on which hundreds of processes start at once."""
    kafka = config.kafka
    errors: list[str] = []
    settings = kafka_settings(config, services)
    settings["error_cb"] = lambda error: errors.append(error.str())
    try:
        admin = AdminClient(settings)
    except KafkaException as exc:
        return _unusable(exc)
    begun_s = time.monotonic()
    log_in = " ".join(filter(None, (kafka.security, kafka.mechanism)))
    while True:  # waits are short, because librdkafka retries a refused login until the time is over
        # Wait longer for a broker that is connected and busy, or starting, than for one that refuses.
        wait_s = timeout_s if errors else _BUSY_TIMES * timeout_s
        left_s = max(begun_s + wait_s - time.monotonic(), 0.0)
        try:
            admin.list_topics(timeout=max(min(left_s, _METADATA_WAIT_S), 0.001))
            return None
        except KafkaException as exc:
            admin.poll(0)  # calls error_cb with the errors that librdkafka has queued
            reason = errors[-1] if errors else exc.args[0].str()
        refusal = next((text for text in reversed(errors) if _remedy(text, kafka) is not None), None)
        if refusal is not None and (left_s <= 0.0 or is_final(refusal)):
            return f"Kafka at {services.kafka} ({log_in}) refuses us ({refusal}): {_remedy(refusal, kafka)}"
        if left_s <= 0.0:
            return (
                f"Kafka at {services.kafka} ({log_in}) does not answer within {wait_s:g} s "
                f"({reason}): start it, or correct kafka.address (or {KAFKA_ENV}) or kafka.security"
            )
