"""Give advice about a login that Kafka or TLS has refused. The advice depends on librdkafka's message. Pure."""

from __future__ import annotations

import re
from typing import Final

from doll.config.connections import WITH_PASSWORD, KafkaConfig

_ADDRESS: Final = re.compile(r"\b(sasl_)?(ssl|plaintext)://\S+")  # does not contain the reason
_OWN_CERTIFICATE: Final = "DOLL_KAFKA_CERT and DOLL_KAFKA_KEY"
_ALERTS: Final = ("alert bad certificate", "alert certificate required", "alert certificate unknown",
                  "alert unknown ca", "alert handshake failure", "alert unsupported certificate",
                  "alert certificate revoked")  # fmt: skip


def login_remedy(reason: str, kafka: KafkaConfig, *, expired: bool = False) -> str | None:
    """Return advice about a refused login; None if `reason`, a message of librdkafka, is not about a login. `expired`:
    our own certificate has expired. Some brokers then report an unknown certificate."""
    text = _ADDRESS.sub("", reason.lower())
    if "alert certificate expired" in text or (expired and "alert " in text):
        return f"our certificate has expired: put a new one into {_OWN_CERTIFICATE}, and start this process again"
    if any(alert in text for alert in _ALERTS):
        return (
            f"the broker does not accept our certificate, or misses one: set {_OWN_CERTIFICATE} to a certificate that "
            "its authority has signed"
        )
    if "hostname mismatch" in text or "ip address mismatch" in text:
        return "the broker's certificate is for another name: use that one in kafka.address, or correct the certificate"
    if "certificate has expired" in text:
        return "the broker's certificate has expired: renew it at the broker"
    if "verify failed" in text or "could not be verified" in text:
        return (
            "the broker's certificate is of an authority that we do not know, or has expired: set DOLL_KAFKA_CA to its "
            "authority's certificates (PEM)"
        )
    if "unsupported sasl mechanism" in text:
        return f"kafka.sasl_mechanism is {kafka.mechanism}: set it to one that the broker has enabled"
    if "not valid in current sasl state" in text:
        return None  # a repeated login on an open connection met a request; the next connection succeeds
    if kafka.mechanism == "OAUTHBEARER" and ("token" in text or "sasl" in text or "oauth" in text):
        return (
            "correct kafka.oauth.token_url (and scope), DOLL_KAFKA_CLIENT_ID and DOLL_KAFKA_CLIENT_SECRET; if the "
            "token comes, the broker must accept its issuer and audience"
        )
    if kafka.mechanism == "AWS_MSK_IAM" and ("token" in text or "sasl" in text or "oauth" in text):
        return (
            "boto3 must find AWS credentials here, and their IAM policy must allow kafka-cluster:Connect on the cluster"
        )
    if kafka.mechanism in WITH_PASSWORD and ("authentication" in text or "sasl" in text):
        return (
            f"correct DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD, and check that the user has a {kafka.mechanism} "
            "password at the broker"
        )
    if "ssl" in text or "sasl" in text:
        return f"kafka.security is {kafka.security}: set it to what this port of the broker speaks"
    return None


def is_final(reason: str) -> bool:
    """Return whether the same login would be refused again. An interrupted handshake may mean a starting broker."""
    text = reason.lower()
    return any(part in text for part in ("authentication failed", "verify failed", "could not be verified", "alert ",
                                         "unsupported sasl mechanism", "invalid credentials", "http 4"))  # fmt: skip
