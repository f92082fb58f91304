"""The fleets that `doll provision` can run workers on.

A new fleet is one class here, and its adapter in `doll.provisioner.fleets`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from doll.config.section import Section
from doll.config.variants import Variants

fleets = Variants("kind", default="processes")


class FleetSection(Section):
    """What all fleets have in common."""

    kind: str
    cluster: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = Field(
        default=None,
        description="marks the machines of this job, and no others are touched; jobs may share it one after the other; "
        "default: the job's name",
    )


@fleets.add
class ProcessesFleetConfig(FleetSection):
    """Worker processes of this machine as instances, on a spot market that is replayed."""

    kind: Literal["processes"] = "processes"
    trace: Path | None = Field(
        default=None,
        description="folder of recorded prices and availability (docs/traces.md); default: two states, up and down, by "
        "`plan.alpha` and `plan.cycle_s`, at the prices of `plan`",
    )
    pool: str | None = Field(default=None, description="pool of the trace; default: its first")
    speed_up: PositiveFloat = Field(
        default=1.0, description="seconds of the market, which is what is billed, per second of this machine"
    )
    notice_s: float = Field(
        default=2.0,
        ge=0,
        description="seconds of this machine from a notice to SIGKILL; `speed_up` does not shorten it",
    )
    no_notice_share: float = Field(
        default=0.0, ge=0, le=1, description="share of the preemptions that come without notice, as they do on EC2"
    )
    boot_s: float = Field(
        default=0.0, ge=0, description="seconds of this machine from a launch until its worker joins the job"
    )


@fleets.add
class ComposeFleetConfig(FleetSection):
    """Containers of a docker compose project as instances."""

    kind: Literal["compose"]
    project: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = Field(
        default="doll", description="name of the compose project, whose network and worker image are used"
    )
    service: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")] = Field(
        default="worker", description="service of the project that a worker's image, command and environment come from"
    )
    file: Path = Field(default=Path("docker-compose.yml"), description="the compose file")
    docker: str = Field(default="docker", description="the docker program")
    timeout_s: PositiveFloat = Field(default=60.0, description="a docker command that takes longer has failed")


@fleets.add
class Ec2FleetConfig(FleetSection):
    """EC2 instances, one per worker slot (docs/aws.md). Credentials as boto3 finds them."""

    kind: Literal["ec2"]
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = Field(
        default=None, description="e.g. us-east-1; default: as boto3 finds it"
    )
    launch_template: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9().\-/_]{3,128}$")] = Field(
        description="id (lt-...) or name of the workers' launch template; it names no market and no instance type"
    )
    launch_template_version: PositiveInt = Field(
        description="a number: what runs must not change because somebody edits the template"
    )
    subnets: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^subnet-[0-9a-f]{8,17}$")]], Field(min_length=1)
    ] = Field(
        description="in order of preference, the parameter server's zone first: traffic between zones costs 0.02 $/GB"
    )
    instance_types: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*\.[a-z0-9-]+$")]], Field(min_length=1)
    ] = Field(description="of about one size; 6 or more keep spot available")
    queue_url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")] | None = Field(
        default=None, description="SQS queue that gets the interruption notices; default: no early notice"
    )
    api_calls_per_s: float = Field(
        default=2.0, gt=0, le=20, description="launches and terminations per second, at most"
    )
    price_cache: Path | None = Field(
        default=None, description="file that keeps on-demand prices; default: `prices.json` in the run folder"
    )
    placement_scores: bool = Field(
        default=False,
        description="ask EC2 at the start and hourly how likely each zone is to have all workers on spot, 1 to 10: "
        "logged, and shown by `doll provision status`; advice, nothing is decided by it",
    )

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if self.placement_scores and len(set(self.instance_types)) < 3:
            raise ValueError("placement_scores: expected 3 or more instance_types: with fewer EC2 always scores low")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for name in ("subnets", "instance_types"):
            given = getattr(self, name)
            if twice := sorted({value for value in given if given.count(value) > 1}):
                raise ValueError(f"{name}: expected each once, got {', '.join(twice)} twice")
        return self


FleetConfig = Annotated[FleetSection, fleets]
