"""The connections to Kafka and Redis: their addresses, and how DOLL logs in.

Secrets come only from the environment (docs/security.md).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, field_validator, model_validator

from doll.config.section import Section

SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM"]
WITH_PASSWORD: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")  # the mechanisms with a user's name and password
KafkaUser = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._=,@/ -]+$")]
_LOOPBACK_URL: Final = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?(/.*)?")


class OAuthConfig(Section):
    """The source of tokens for sasl_mechanism: OAUTHBEARER, by OAuth 2.0 client credentials. The client's id and secret
    are in $DOLL_KAFKA_CLIENT_ID and $DOLL_KAFKA_CLIENT_SECRET."""

    token_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]+$", max_length=2000)]
    """https:// address of the token endpoint; http:// is allowed on loopback only"""
    scope: Annotated[str, StringConstraints(pattern=r"^[!#-\[\]-~ ]+$", max_length=2000)] | None = None
    """scopes to request, separated by spaces"""
    extensions: dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z]+$")],
        Annotated[str, StringConstraints(pattern=r"^[!-+\--~]+$", max_length=500)],
    ] = Field(default_factory=dict)
    """SASL extensions that are sent to the broker; Confluent Cloud needs logicalCluster and identityPoolId"""

    @model_validator(mode="after")
    def _secret_is_encrypted(self) -> Self:
        if self.token_url.startswith("http://") and not _LOOPBACK_URL.fullmatch(self.token_url):
            raise ValueError(
                "token_url: expected https://: over http:// the client's secret could be read on its way; http:// is "
                "for loopback"
            )
        return self


class KafkaConfig(Section):
    """The connection to Kafka."""

    address: str | None = None
    """host:port[,host:port]; default: $DOLL_KAFKA, else a local broker is started"""
    replication_factor: PositiveInt = Field(default=1, le=32_767)
    """replication factor of the topics that DOLL creates"""
    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    """`ssl` with a client's certificate ($DOLL_KAFKA_CERT, $DOLL_KAFKA_KEY) is mTLS; see docs/security.md"""
    sasl_mechanism: SaslMechanism | None = None
    """how DOLL logs in if `security` begins with sasl. AWS_MSK_IAM: with boto3's AWS credentials. Default:
    SCRAM-SHA-512"""
    oauth: OAuthConfig | None = None
    """source of the tokens, with sasl_mechanism: OAUTHBEARER"""
    worker_user: KafkaUser | None = None
    """Kafka user of the workers, with only the permissions on the job's topics that a worker needs (docs/security.md);
    its ACLs are set when the topics are created or checked"""
    producer_user: KafkaUser | None = None
    """Kafka user that is only allowed to write to `samples`; its ACLs are set when the topics are created or checked"""

    @property
    def mechanism(self) -> SaslMechanism | None:
        """The SASL mechanism of all clients; None without SASL."""
        return (self.sasl_mechanism or "SCRAM-SHA-512") if self.security.startswith("sasl") else None

    @field_validator("address", mode="before")
    @classmethod
    def _no_secret(cls, value: Any) -> Any:
        if isinstance(value, str) and "@" in value:
            raise ValueError("no credentials in the job file: set DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD instead")
        return value

    @model_validator(mode="after")
    def _one_log_in(self) -> Self:
        if self.sasl_mechanism is not None and self.mechanism is None:
            raise ValueError(
                f"sasl_mechanism: expected security: sasl_ssl (or sasl_plaintext) with it, got {self.security}"
            )
        if self.mechanism == "AWS_MSK_IAM" and self.security != "sasl_ssl":
            raise ValueError(f"sasl_mechanism: AWS_MSK_IAM: expected security: sasl_ssl, got {self.security}")
        if (self.oauth is not None) != (self.mechanism == "OAUTHBEARER"):
            raise ValueError(
                "oauth: expected oauth.token_url with sasl_mechanism: OAUTHBEARER, and no oauth with any other, got "
                f"{'oauth' if self.oauth else 'no oauth'} with {self.mechanism or 'security: ' + self.security}"
            )
        for name in ("worker_user", "producer_user"):
            if getattr(self, name) is not None and self.mechanism in ("OAUTHBEARER", "AWS_MSK_IAM"):
                raise ValueError(
                    f"{name}: with {self.mechanism} DOLL does not know its own principal, whom the first ACL would "
                    f"exclude: remove {name}, and give the permissions yourself (docs/security.md)"
                )
        return self


class RedisConfig(Section):
    """The connection to Redis."""

    address: str | None = None
    """redis://host:port/db, redis+sentinel://host:port[,host:port]/PRIMARY[/db] or
    redis+cluster://host:port[,host:port]; `rediss` instead of `redis` is the same with TLS; default: $DOLL_REDIS, else
    a local server is started"""
    shard_addresses: list[str] = Field(default=[], max_length=256)
    """addresses of Redis servers, one for each shard of `ps.shards`, in order, for its slices of weights and
    contributions. All use the same secrets. Everything else is in `address`. Default: so are the slices"""

    @field_validator("address", "shard_addresses", mode="before")
    @classmethod
    def _no_secret(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and ("@" in text or "?" in text) for text in texts):
            raise ValueError(
                "no credentials in the job file: set DOLL_REDIS_PASSWORD (and DOLL_REDIS_USERNAME) instead"
            )
        return value
