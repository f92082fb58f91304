"""EC2 on moto with a market, for the tests of everything that talks to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_rigs import Ec2Rig, ec2


@pytest.fixture
def rig() -> Iterator[Ec2Rig]:
    with ec2() as made:
        assert isinstance(made, Ec2Rig)
        yield made
