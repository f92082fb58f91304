"""What is said of a refused log-in. The reasons are librdkafka's and a Kafka 4.1's, as they came."""

from __future__ import annotations

import pytest
from doll.config.connections import KafkaConfig, OAuthConfig
from doll.kafka.remedies import is_final, login_remedy

PLAIN = KafkaConfig(security="sasl_ssl", sasl_mechanism="PLAIN")
OAUTH = KafkaConfig(
    security="sasl_ssl", sasl_mechanism="OAUTHBEARER", oauth=OAuthConfig(token_url="https://issuer/token")
)
MUTUAL = KafkaConfig(security="ssl")


@pytest.mark.parametrize(
    ("kafka", "reason", "remedy"),
    [
        (PLAIN, "SASL authentication error: Authentication failed: Invalid username or password (after 2ms in state "
         "AUTH_REQ)", "correct DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD"),
        (PLAIN, "SASL PLAIN mechanism handshake failed: Broker: Unsupported SASL mechanism: broker's supported "
         "mechanisms: OAUTHBEARER", "set it to one that the broker has enabled"),
        (PLAIN, "SSL handshake failed: error:0A000086:SSL routines::certificate verify failed: broker certificate "
         "could not be verified, verify that ssl.ca.location is correctly configured", "set DOLL_KAFKA_CA"),
        (MUTUAL, "SSL handshake failed: ssl/tls alert certificate expired: SSL alert number 45",
         "our certificate has expired"),
        (MUTUAL, "SSL handshake failed: tlsv13 alert certificate required: SSL alert number 116",
         "misses one: set DOLL_KAFKA_CERT"),
        (OAUTH, "Failed to retrieve OIDC token from https://issuer/token: HTTP 401", "DOLL_KAFKA_CLIENT_SECRET"),
        (MUTUAL, "SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker listener?",
         "kafka.security is ssl"),
    ],
)  # fmt: skip
def test_a_refusal_has_a_remedy(kafka: KafkaConfig, reason: str, remedy: str) -> None:
    said = login_remedy(reason, kafka)
    assert said is not None
    assert remedy in said


def test_what_is_no_refusal_has_none() -> None:
    refused = (
        "127.0.0.1:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 0ms in state CONNECT)"
    )
    for reason in (refused, f"sasl_ssl://{refused}", f"ssl://{refused}", f"sasl_plaintext://{refused}"):
        assert [login_remedy(reason, kafka) for kafka in (PLAIN, OAUTH, MUTUAL)] == [None, None, None]
        assert not is_final(reason)
