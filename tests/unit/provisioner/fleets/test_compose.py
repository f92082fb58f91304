"""What only the compose fleet does: the commands, what docker says, and what it keeps. On a likeness of docker 27."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doll.config import parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets import compose as compose_fleet
from doll.provisioner.fleets.compose import GRACE_S, POOL
from doll.provisioner.fleets.port import EndReason, InstanceState, LaunchFailure, Order
from fake_docker import DAEMON
from fleet_rigs import ComposeRig, compose, refused

NAME = "digits-w3-i2-spot-a0"


@pytest.fixture
def rig() -> Iterator[ComposeRig]:
    with compose() as made:
        assert isinstance(made, ComposeRig)
        yield made


def test_a_launch_is_one_run_of_the_worker_service_with_its_identity(rig: ComposeRig) -> None:
    made = rig.fleet.launch(Order(3, 2, "spot"))
    assert (made.id, made.pool) == (NAME, POOL)
    looked, ran, inspected = rig.calls()
    assert looked == inspected == ["inspect", "--type", "container", NAME]
    assert ran[:5] == ["compose", "--project-name", "doll", "--file", str(rig.folder / "docker-compose.yml")]
    assert ran[5:10] == ["run", "--detach", "--no-deps", "--name", NAME]
    assert ran[-1] == "worker"
    config = rig.state()["containers"][NAME]["Config"]
    assert config["Env"] == [
        "DOLL_WORKER=3",
        "DOLL_INCARNATION=2",
        f"DOLL_INSTANCE={NAME}",
        "DOLL_MARKET=spot",
    ]
    labels = {"doll.cluster": "digits", "doll.worker": "3", "doll.incarnation": "2", "doll.market": "spot"}
    assert labels.items() <= config["Labels"].items()


def test_a_container_that_was_made_and_not_started_is_started(rig: ComposeRig) -> None:
    """docker compose run makes a container and then starts it; it may die between the two."""
    rig.fleet.launch(Order(3, 2, "spot"))
    containers = rig.state()["containers"]
    containers[NAME]["State"] |= {"Status": "created", "Running": False}
    rig.change(containers=containers)
    rig.crash()
    assert [instance.state for instance in rig.fleet.instances()] == [InstanceState.PENDING]
    assert rig.fleet.launch(Order(3, 2, "spot")).state is InstanceState.RUNNING
    assert ["start", NAME] in rig.calls()


def test_one_that_never_started_is_removed_when_it_is_to_end(rig: ComposeRig) -> None:
    rig.fleet.launch(Order(3, 2, "spot"))
    containers = rig.state()["containers"]
    containers[NAME]["State"] |= {"Status": "created", "Running": False}
    rig.change(containers=containers)
    rig.fleet.terminate([NAME])
    assert rig.state()["containers"] == {}


def test_an_end_is_asked_for_and_then_forced(rig: ComposeRig) -> None:
    rig.fleet.launch(Order(3, 2, "spot"))
    rig.change(stubborn=[NAME])
    rig.fleet.terminate([NAME])
    assert ["kill", "--signal", "SIGTERM", NAME] in rig.calls()
    rig.advance(GRACE_S - 1)
    assert [instance.state for instance in rig.fleet.instances()] == [InstanceState.ENDING]
    assert ["kill", NAME] not in rig.calls()
    rig.advance(2)
    rig.fleet.instances()
    assert ["kill", NAME] in rig.calls()
    (ended,) = rig.fleet.instances()
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.TERMINATED)
    rig.crash()
    assert list(rig.fleet.instances()) == [ended], "who ended it shows after a crash too: by the exit code"


def test_a_container_that_the_kernel_killed_for_its_memory_has_failed(rig: ComposeRig) -> None:
    rig.fleet.launch(Order(3, 2, "spot"))
    rig.fail_instance(NAME)
    containers = rig.state()["containers"]
    containers[NAME]["State"] |= {"ExitCode": 137, "OOMKilled": True}
    rig.change(containers=containers)
    assert [instance.end_reason for instance in rig.fleet.instances()] == [EndReason.FAILED]


def test_what_ended_an_hour_ago_is_removed(rig: ComposeRig) -> None:
    rig.fleet.launch(Order(3, 2, "spot"))
    rig.fleet.terminate([NAME])
    rig.advance(3599)
    assert len(rig.fleet.instances()) == 1
    rig.advance(2)
    assert list(rig.fleet.instances()) == []
    assert rig.state()["containers"] == {}


def test_containers_with_our_label_that_are_no_workers_are_let_alone(rig: ComposeRig) -> None:
    rig.fleet.launch(Order(3, 2, "spot"))
    containers = rig.state()["containers"]
    containers[NAME]["Config"]["Labels"]["doll.incarnation"] = "?"
    rig.change(containers=containers)
    assert list(rig.fleet.instances()) == []
    rig.fleet.terminate([NAME])
    assert rig.state()["containers"][NAME]["State"]["Running"]


@pytest.mark.parametrize(
    ("says", "failure"),
    [
        (DAEMON, LaunchFailure.THROTTLED),
        ("error during connect: Get: EOF", LaunchFailure.THROTTLED),
        ("mkdir /var/lib/docker/x: no space left on device", LaunchFailure.CAPACITY),
        ("could not find an available, non-overlapping IPv4 address pool", LaunchFailure.CAPACITY),
        ("pull access denied for doll, repository does not exist", LaunchFailure.CONFIG),
        ("something that nobody expects", LaunchFailure.CONFIG),
    ],
)
def test_what_docker_says_decides_what_to_do(rig: ComposeRig, says: str, failure: LaunchFailure) -> None:
    rig.change(fail_before={"compose": says})
    error = refused(rig.fleet, Order(3, 2, "spot"))
    assert error.failure is failure
    assert error.pools == (frozenset({POOL}) if failure is LaunchFailure.CAPACITY else frozenset())
    assert says in str(error)


def test_the_only_pool_can_be_avoided(rig: ComposeRig) -> None:
    error = refused(rig.fleet, Order(3, 2, "spot", avoid=frozenset({POOL})))
    assert (error.failure, error.pools) == (LaunchFailure.CAPACITY, frozenset({POOL}))
    assert rig.calls() == []


def test_a_service_that_is_not_there_is_a_mistake(rig: ComposeRig) -> None:
    rig.fleet = rig.make(service="workers")
    error = refused(rig.fleet, Order(3, 2, "spot"))
    assert (error.failure, "no such service: workers" in str(error)) == (LaunchFailure.CONFIG, True)


def test_without_docker_it_says_so(rig: ComposeRig) -> None:
    rig.fleet = rig.make(docker=str(rig.folder / "none"))
    assert refused(rig.fleet, Order(3, 2, "spot")).failure is LaunchFailure.CONFIG
    with pytest.raises(ConfigError, match=r"cannot run .*none"):
        rig.fleet.instances()
    with pytest.raises(ConfigError, match=r"cannot run .*none"):
        rig.fleet.terminate([NAME])


def test_a_docker_that_hangs_is_given_up(rig: ComposeRig) -> None:
    hangs = rig.folder / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    rig.fleet = rig.make(docker=str(hangs), timeout_s=0.2)
    with pytest.raises(ServiceUnavailableError, match=r"no end within 0\.2 s"):
        rig.fleet.instances()
    assert refused(rig.fleet, Order(3, 2, "spot")).failure is LaunchFailure.THROTTLED


def test_a_fleet_is_made_from_the_job_file(rig: ComposeRig) -> None:
    text = "job: digits\ntask: {class: 'examples.digits.task:Digits'}\n"
    config = parse(text, ["fleet={kind: compose}"], base_folder=rig.folder)
    compose_fleet.connect(config).close()
    with pytest.raises(
        ConfigError, match=r"fleet\.file: expected a compose file, got .*none\.yml, which does not exist or is no file"
    ):
        compose_fleet.connect(parse(text, ["fleet={kind: compose, file: none.yml}"], base_folder=rig.folder))
    with pytest.raises(ConfigError, match=r"fleet\.kind: expected compose, got processes"):
        compose_fleet.connect(parse(text))
