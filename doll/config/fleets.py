"""The fleets on which `doll provision` can run workers.

To add a fleet, add one class here, its adapter in `doll.provisioner.fleets`, and a function that opens it to
`OPENERS` of `doll.provisioner.machines`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from doll.config.section import Section
from doll.config.variants import Variants


class FleetSection(Section):
    """The keys that all fleets have in common."""

    kind: str
    cluster: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None
    """name that identifies the machines of this job; other machines are not changed. Jobs that run one after the other
    may share it; default: the job's name"""


class ProcessesFleetConfig(FleetSection):
    """Worker processes on this machine as instances of a replayed spot market."""

    kind: Literal["processes"] = "processes"
    trace: Path | None = None
    """folder of recorded prices and availability (docs/traces.md); default: random available and unavailable periods
    according to `plan.alpha` and `plan.cycle_s`, at the prices of `plan`"""
    pool: str | None = None
    """pool of the trace; default: the first pool of the trace"""
    speed_up: PositiveFloat = Field(default=1.0, ge=1e-6, le=1e6)
    """seconds of market time, which is billed, per second of real time"""
    notice_s: float = Field(default=2.0, ge=0)
    """real seconds between an interruption notice and SIGKILL, independent of `speed_up`"""
    no_notice_share: float = Field(default=0.0, ge=0, le=1)
    """share of the preemptions that come without a notice, as happens on EC2"""
    boot_s: float = Field(default=0.0, ge=0)
    """real seconds from a launch until the worker starts to join the job"""


class ComposeFleetConfig(FleetSection):
    """Containers of a docker compose project as instances."""

    kind: Literal["compose"]
    project: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")] = "doll"
    """name of the compose project, whose network and worker image are used"""
    service: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")] = "worker"
    """service of the project that defines the image, command and environment of a worker"""
    file: Path = Path("docker-compose.yml")
    """the compose file"""
    docker: str = "docker"
    """the docker program"""
    timeout_s: PositiveFloat = 60.0
    """timeout of a docker command"""


class Ec2FleetConfig(FleetSection):
    """EC2 instances, one per worker slot (docs/aws.md), with the default credentials of boto3."""

    kind: Literal["ec2"]
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = None
    """region, such as us-east-1; default: the default region of boto3"""
    launch_template: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9().\-/_]{3,128}$")]
    """id (lt-...) or name of the workers' launch template, without market and instance type"""
    launch_template_version: PositiveInt
    """version number of the launch template, so that edits of the template do not change running jobs"""
    subnets: Annotated[list[Annotated[str, StringConstraints(pattern=r"^subnet-[0-9a-f]{8,17}$")]], Field(min_length=1)]
    """subnets in order of preference; the first one should be in the parameter server's zone: traffic between zones
    costs 0.02 $/GB"""
    instance_types: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*\.[a-z0-9-]+$")]], Field(min_length=1)
    ]
    """instance types of similar size; 6 or more improve the availability of spot"""
    queue_url: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")] | None = None
    """SQS queue of the interruption notices; default: no early notice"""
    api_calls_per_s: float = Field(default=2.0, gt=0, le=20)
    """maximum number of launches and terminations per second"""
    price_cache: Path | None = None
    """cache file for on-demand prices; default: `prices.json` in the run folder"""
    placement_scores: bool = False
    """request EC2's spot placement score of each zone (1 to 10) for all workers, at the start and then hourly: the
    scores are logged and shown by `doll provision status`, and have no influence on decisions"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.placement_scores and len(set(self.instance_types)) < 3:
            raise ValueError(
                "placement_scores: expected 3 or more instance_types: with fewer, EC2 always returns a low score"
            )
        for name in ("subnets", "instance_types"):
            given = getattr(self, name)
            if twice := sorted({value for value in given if given.count(value) > 1}):
                raise ValueError(f"{name}: expected each once, got {', '.join(twice)} twice")
        return self


class PodPlacement(Section):
    """The nodes on which the pods of one market run."""

    node_selector: dict[str, str] = Field(default={})
    """labels that a node must have"""
    tolerations: list[dict[str, Any]] = Field(default=[])
    """taints that a node may have, as in a pod's `tolerations`"""


class KubernetesFleetConfig(FleetSection):
    """Pods of a Kubernetes cluster as instances (docs/guide/kubernetes.md), one per worker slot."""

    kind: Literal["kubernetes"]
    pod_template: Path
    """YAML file of a v1 Pod: image, command, resources and secrets of a worker; DOLL adds names, labels, a restart
    policy, an `activeDeadlineSeconds` of one day and DOLL_WORKER, DOLL_INCARNATION, DOLL_INSTANCE and DOLL_MARKET"""
    stage_template: Path | None = None
    """YAML file of the pod of a stage, which runs `doll stage`, with `worker.pipeline.remote`; DOLL adds what it adds
    to `pod_template`, and DOLL_STAGE, DOLL_LISTEN and DOLL_GANG"""
    container: str = "worker"
    """name of the templates' container that runs the worker or the stage"""
    namespace: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    """namespace of the pods; default: that of the kubeconfig's context, or of the pod in which the provisioner runs"""
    kubeconfig: Path | None = None
    """path of the kubeconfig; default: the service account of the pod in which the provisioner runs, otherwise
    KUBECONFIG, otherwise ~/.kube/config"""
    context: str | None = None
    """context of the kubeconfig; default: its current context"""
    spot: PodPlacement = PodPlacement(node_selector={"karpenter.sh/capacity-type": "spot"})
    """placement of spot workers; default: Karpenter's label"""
    on_demand: PodPlacement = PodPlacement(node_selector={"karpenter.sh/capacity-type": "on-demand"})
    """placement of on-demand workers"""
    owner: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")] | None = None
    """name of a ConfigMap in the namespace: when it is deleted, the pods end, even if no provisioner is running"""
    node_timeout_s: PositiveFloat = 180.0
    """a pod that no node accepts within this time is deleted, and its market counts as without capacity for a while; an
    autoscaler needs one to two minutes to add a node. A pod that cannot start on its node within this time is also
    deleted"""
    timeout_s: PositiveFloat = 20.0
    """timeout of a call to the API server"""

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        if self.spot == self.on_demand:
            raise ValueError("spot, on_demand: expected different placements: both markets would get the same nodes")
        return self


class RayFleetConfig(FleetSection):
    """Actors of a Ray cluster as instances (docs/guide/ray.md), one per worker slot."""

    kind: Literal["ray"]
    address: Annotated[str, StringConstraints(pattern=r"^(auto|[A-Za-z0-9.-]+:[0-9]{1,5})$")] = "auto"
    """address host:port of the cluster's head, to be used on one of the cluster's nodes; `auto`: the cluster of which
    this machine is a node; if the machine is not a node, `doll up` starts a cluster. Ray's client connection, ray://,
    is not supported because it does not show which nodes are being drained"""
    spot: Annotated[dict[str, str], Field(min_length=1)] = Field(default={"ray.io/market-type": "spot"})
    """labels of the nodes of spot workers; a value may be `in(a, b)`, `!a` or `!in(a, b)`, as in Ray"""
    on_demand: Annotated[dict[str, str], Field(min_length=1)] = Field(default={"ray.io/market-type": "on-demand"})
    """labels of the nodes of on-demand workers"""
    command: Annotated[list[str], Field(min_length=1)] = Field(
        default=["{python}", "-m", "doll", "worker", "--job", "{job}"]
    )
    """command of a worker; `{python}` is replaced by the node's interpreter, `{job}` by the worker's job file"""
    num_cpus: PositiveFloat = 1.0
    """CPUs of a node that a worker reserves"""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs of a node that a worker reserves"""
    memory_bytes: PositiveInt | None = None
    """memory of a node that Ray reserves for a worker; default: none"""
    working_dir: Path | None = None
    """folder that Ray copies to the nodes; relative paths of the job file refer to the copy there. Default: the nodes
    have code and files at the same path as this machine"""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the workers, e.g. `{pip: [...]}`"""
    env: dict[str, str] = Field(default={})
    """additional environment variables of the workers; no passwords, because Ray shows them: set these on the nodes"""
    node_timeout_s: PositiveFloat = 180.0
    """a worker that no node accepts within this time is cancelled, and its market counts as without capacity for a
    while"""
    timeout_s: PositiveFloat = 20.0
    """timeout of a call to Ray"""

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        if self.spot == self.on_demand:
            raise ValueError("spot, on_demand: expected different labels: both markets would get the same nodes")
        return self


MAX_FUNCTION_S = 900  # AWS's limit of an invocation


class LambdaFleetConfig(FleetSection):
    """Invocations of a function on AWS Lambda as instances (docs/guide/functions.md), one per worker slot.

    Before the time limit of an invocation, its successor starts, and takes the place when it is warm.
    """

    kind: Literal["lambda"]
    function: Annotated[
        str,
        StringConstraints(
            pattern=r"^(arn:aws[a-z-]*:lambda:[a-z0-9-]+:\d{12}:function:)?[A-Za-z0-9_-]{1,64}(:[A-Za-z0-9_-]{1,128})?$"
        ),
    ]
    """name or ARN of the function, with a version or an alias if it has one. The image of the function has this
    package, its extra `lambda`, and the task"""
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")] | None = None
    """region, such as us-east-1; default: the default region of boto3"""
    memory_mb: int = Field(default=1769, ge=128, le=10_240)
    """memory of the function, which also determines its share of a CPU: 1769 MB are one vCPU"""
    timeout_s: int = Field(default=MAX_FUNCTION_S, ge=30, le=MAX_FUNCTION_S)
    """time limit of an invocation, which must be that of the function"""
    ephemeral_mb: int = Field(default=512, ge=512, le=10_240)
    """size of /tmp in the function"""
    start_s: PositiveFloat = Field(default=30.0, le=MAX_FUNCTION_S)
    """time from a launch until the worker is warm, which is used until starts have been measured"""
    start_timeout_s: PositiveFloat = 180.0
    """an invocation that has not started after this time is given up, and its market counts as without capacity for a
    while: the function's concurrency is used up"""
    usd_per_gb_h: PositiveFloat = Field(default=0.06, le=1000.0)
    """price of a GB of memory for an hour, 3600 times AWS's price of a GB-second; default: x86 in us-east-1, as known
    in November 2026"""
    folder: str = "/var/task"
    """folder in the image to which relative paths of the job file refer"""

    @model_validator(mode="after")
    def _lives_long_enough(self) -> Self:
        if self.timeout_s < 2 * self.start_s:
            raise ValueError(
                f"timeout_s: expected twice start_s ({self.start_s:g} s) or more, got {self.timeout_s}: the successor "
                "of an invocation would have to start before the invocation itself is warm"
            )
        return self

    @property
    def usd_per_h(self) -> float:
        """The price of an invocation that runs for an hour."""
        return self.memory_mb / 1024 * self.usd_per_gb_h


fleets = Variants(
    "kind",
    ProcessesFleetConfig, ComposeFleetConfig, Ec2FleetConfig, KubernetesFleetConfig, RayFleetConfig, LambdaFleetConfig,
    default="processes",
)  # fmt: skip

FleetConfig = Annotated[FleetSection, fleets]
