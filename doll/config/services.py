"""Where Kafka and Redis are. Credentials come from the environment only."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from doll.config.section import Section


class KafkaConfig(Section):
    """The connection to Kafka."""

    address: str | None = Field(
        default=None, description="host:port[,host:port]; default: $DOLL_KAFKA, else a local broker is started"
    )
    replication_factor: PositiveInt = Field(le=32_767, default=1, description="of the topics that DOLL creates")
    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    producer_user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._=,@/ -]+$")] | None = Field(
        default=None,
        description="Kafka user that may only write to `samples`; its ACLs are set when the topics are created or "
        "checked",
    )

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        if self.address and "@" in self.address:
            raise ValueError("no credentials in the job file: set DOLL_KAFKA_USERNAME and DOLL_KAFKA_PASSWORD instead")
        return self


class RedisConfig(Section):
    """The connection to Redis."""

    address: str | None = Field(
        default=None, description="redis://host:port/db; default: $DOLL_REDIS, else a local server is started"
    )

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        if self.address and ("@" in self.address or "?" in self.address):
            raise ValueError(
                "no credentials in the job file: set DOLL_REDIS_PASSWORD (and DOLL_REDIS_USERNAME) instead"
            )
        return self


class ControlConfig(Section):
    """The channel of grants and pushes between parameter server and workers. Everything else goes through Kafka."""

    kind: Literal["auto", "kafka", "redis", "local"] = Field(
        default="auto",
        description="auto: the fastest that connects, a socket on the parameter server's machine, else Redis, else "
        "Kafka; local: the socket, else Kafka; redis: streams in Redis, else Kafka; kafka: always Kafka",
    )
