"""Fleets: the port, and one adapter per kind of machines.

To add a fleet: write a module here with a class that implements `doll.provisioner.fleets.port.Fleet` and a function
that opens it from the job file; add its section to `doll.config.fleets` and its opener to
`doll.provisioner.machines.OPENERS`; add a rig to tests/support/fleet_rigs.py, so that the contract of all fleets
(tests/contract/test_fleet.py) runs on it.
"""
