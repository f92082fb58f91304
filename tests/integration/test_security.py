"""A whole job over TLS: Kafka with SCRAM-SHA-512, Redis with an ACL user; wrong secrets are refused and never shown."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis
from certificates import Authority
from doll.config import JobConfig, parse
from doll.errors import ServiceUnavailableError
from doll.kafka.clients import kafka_problem
from doll.local import kafka_jars, processes
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis, find_executable
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.redis_client import connect_redis, redis_problem
from forked_commands import Program
from redis_groups import redis_process, supports_tls
from secured_kafka import SecuredKafka

pytestmark = pytest.mark.integration

USER, KAFKA_SECRET, REDIS_SECRET = "doll", "k4fka-hush-hush", "r3dis-hush-hush"
JOB = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: 4, classes: 2}}}}
arrivals: {{process: poisson, rate_per_s: 200}}
training: {{policy: {{name: doll, group_size: 2}}}}
kafka: {{security: sasl_ssl, address: '{kafka}'}}
redis: {{address: '{redis}'}}
evaluation: {{enabled: false}}
stop: {{updates: 20}}
"""


@dataclass(frozen=True)
class Secured:
    services: Services
    environment: dict[str, str]


def identity(folder: Path) -> tuple[Path, Path]:
    """A certificate authority of our own, and key with certificate for loopback: (ca.pem, server.pem)."""
    authority = Authority(folder)
    return authority.path, authority.issue("server")


@contextlib.contextmanager
def tls_in_front_of(port: int, own: Path) -> Iterator[int]:
    """A port that speaks TLS and passes on to `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as secure:
            secure.settimeout(300)
            with socket.create_connection(("127.0.0.1", port)) as inner:
                while True:
                    ready = [secure] if secure.pending() else select.select([secure, inner], [], [], 300)[0]
                    if not ready:
                        return
                    for end in ready:
                        data = end.recv(65_536)
                        if not data:
                            return
                        (inner if end is secure else secure).sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@dataclass(frozen=True)
class Broker:
    address: str
    ca: Path
    own: Path


@pytest.fixture(scope="module")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    if (unavailable_reason := kafka_jars.unavailable_reason()) is not None:
        pytest.skip(f"no Kafka broker can be started: {unavailable_reason}")
    from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

    folder = tmp_path_factory.mktemp("secured")
    ca, own = identity(folder)
    settings = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.scram.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "listener.name.scram.ssl.keystore.type": "PEM",
        "listener.name.scram.ssl.keystore.location": str(own),
    }
    with SecuredKafka(folder / "kafka", {"scram": "SASL_SSL"}, settings) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.address})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        user = UserScramCredentialUpsertion(USER, scram, KAFKA_SECRET.encode())
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(300)
        yield Broker(kafka.address_of("scram"), ca, own)


@pytest.fixture(scope="module", params=["a front", "redis itself"])
def secured(
    request: pytest.FixtureRequest, secured_kafka: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """Redis behind TLS: by a front of ours, which every machine has, and by Redis where it was built with TLS."""
    folder, own = tmp_path_factory.mktemp("secured"), secured_kafka.own
    with contextlib.ExitStack() as open_:
        if request.param == "a front":
            server = open_.enter_context(LocalRedis(folder / "redis"))
            plain = server.address
            port = open_.enter_context(tls_in_front_of(int(plain.split(":")[2].split("/")[0]), own))
        else:
            executable = find_executable()
            if executable is None or not supports_tls(executable):
                pytest.skip(f"{executable} was built without TLS: install Debian's redis-server, for instance")
            first, port, file = processes.free_port(), processes.free_port(), str(own)
            tls = ["--tls-port", str(port), "--tls-cert-file", file, "--tls-key-file", file]
            # Clients authenticate with a password, not with a certificate.
            tls += ["--tls-ca-cert-file", file, "--tls-auth-clients", "no"]
            open_.enter_context(redis_process(folder, "redis", first, *tls))
            plain = f"redis://127.0.0.1:{first}/0"
        client = redis.Redis.from_url(plain)
        client.execute_command("ACL", "SETUSER", USER, "on", f">{REDIS_SECRET}", "~doll:*", "+@all", "-@dangerous")
        client.execute_command("ACL", "SETUSER", "default", "off")
        client.close()
        ca = str(secured_kafka.ca)
        yield Secured(
            Services(secured_kafka.address, f"rediss://127.0.0.1:{port}/0"),
            {
                "DOLL_KAFKA_USERNAME": USER, "DOLL_KAFKA_PASSWORD": KAFKA_SECRET, "DOLL_KAFKA_CA": ca,
                "DOLL_REDIS_USERNAME": USER, "DOLL_REDIS_PASSWORD": REDIS_SECRET, "DOLL_REDIS_CA": ca,
            },
        )  # fmt: skip


def config(secured: Secured) -> JobConfig:
    return parse(JOB.format(job="secure", kafka=secured.services.kafka, redis=secured.services.redis))


def test_a_whole_job_over_tls_with_log_ins(secured: Secured, tmp_path: Path, job_name: str, doll: Program) -> None:
    """librdkafka and redis-py all log in; afterwards no file that the run left holds a secret."""
    (tmp_path / "job.yaml").write_text(
        JOB.format(job=job_name, kafka=secured.services.kafka, redis=secured.services.redis)
    )
    done = doll("up", "job.yaml", "--json", cwd=tmp_path, **secured.environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["updates"], report["kafka_kind"], report["redis_kind"]) == (20, "given", "given")
    assert report["audit"]["ok"]
    assert (report["audit"]["applied"], report["audit"]["missing"], report["audit"]["duplicate"]) == (320, 0, 0)
    texts = [done.stdout.encode(), done.stderr.encode()]
    texts += [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(texts) > 10
    for secret in (KAFKA_SECRET, REDIS_SECRET):
        assert not any(secret.encode() in text for text in texts)


def test_the_secured_services_answer_and_refuse_wrong_secrets_without_repeating_them(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in secured.environment.items():
        monkeypatch.setenv(name, value)
    require_services(config(secured), secured.services)
    for name in ("DOLL_KAFKA_PASSWORD", "DOLL_REDIS_PASSWORD"):
        monkeypatch.setenv(name, "wr0ng-hush-hush")
    with pytest.raises(ServiceUnavailableError) as caught:
        require_services(config(secured), secured.services, timeout_s=60.0)
    message = str(caught.value)
    assert "Kafka at" in message
    assert "refuses us" in message
    assert "DOLL_KAFKA_PASSWORD" in message
    assert "DOLL_REDIS_PASSWORD" in message
    out, err = capfd.readouterr()
    assert "hush-hush" not in message + out + err
    client = connect_redis(secured.services)
    assert "hush-hush" not in repr(client)
    assert "hush-hush" not in str(client)
    client.close()


def test_a_certificate_of_another_authority_is_refused(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without this, TLS would hide the log-in from listeners only, not from whoever answers."""
    stranger, _ = identity(tmp_path)
    for name, value in secured.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("DOLL_KAFKA_CA", "DOLL_REDIS_CA"):
        monkeypatch.setenv(name, str(stranger))
    kafka = kafka_problem(config(secured), secured.services, 60.0)
    assert kafka is not None
    assert "DOLL_KAFKA_CA" in kafka
    answer = redis_problem(secured.services)
    assert answer is not None
    assert "certificate verify failed" in answer


def test_a_plain_client_gets_nothing(secured: Secured) -> None:
    plain = parse("job: j\ntask: {class: 'a:B'}")
    assert kafka_problem(plain, secured.services, 3.0) is not None
    assert redis_problem(Services("", secured.services.redis.replace("rediss:", "redis:")), 1.0) is not None


def test_our_own_servers_listen_on_loopback_only(broker: LocalKafka, redis_server: LocalRedis) -> None:
    for server in (broker, redis_server):
        assert server.pid is not None
        deadline_s = time.monotonic() + 60
        while not (listening := [
            c.laddr for c in psutil.Process(server.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN
        ]):  # fmt: skip
            assert time.monotonic() < deadline_s
        # Java opens dual-stack sockets, which show the address as an IPv6 one.
        hosts = {address.ip.removeprefix("::ffff:") for address in listening}
        assert hosts == {"127.0.0.1"}
