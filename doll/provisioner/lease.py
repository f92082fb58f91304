"""The lease, which ensures that only one provisioner works at a time, because two would launch twice the fleet. Only
the newest claim is valid; a provisioner with an older claim stops.

Claims are stored beside the job's checkpoints. As for parameter servers, a claim is a file or S3 object that is created
exclusively. The newest provisioner also renews its lease. The lease is a document with an increasing number, which a
provisioner replaces only if its own document is still there. A standby claims the job if it sees no new number for the
length of a lease. The standby measures this time with its own clock, and only while the store is available, because
nobody can renew a lease in an unavailable store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from doll import telemetry
from doll.config import JobConfig
from doll.errors import CheckpointError, FencedError
from doll.process.health import heartbeat_of
from doll.records.bounded import short
from doll.storage.checkpoints import CheckpointStore
from doll.storage.stores import open_store

log = telemetry.get_logger(__name__)

DOCUMENT: Final = "lease.json"
_RENEWALS: Final = 3  # number of renewals within a lease
_LONGEST_S: Final = 10.0  # longest time between two renewals
_LOOKS: Final = 10  # number of looks of a standby within a lease
_ATTEMPTS: Final = 10

HolderState = Literal["held", "left", "ended"]


class Holder(msgspec.Struct, frozen=True):
    """The content of the lease document: the number of the claim, a number that increases with each renewal, and the
    state. `left`: the provisioner was asked to stop, and the job continues. `ended`: there is nothing left to do."""

    provisioner: int = 0
    renewal: int = 0
    state: HolderState = "held"


class Lease:
    """An exclusive right to change the job's fleet, held from construction. Raises CheckpointError if claims cannot be
    written.

    A standby takes over if the lease is not renewed for `lease_s`. `clock` returns monotonic seconds.
    """

    def __init__(
        self, claims: CheckpointStore, lease_s: float = 30.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._claims = claims
        self._every_s = min(_LONGEST_S, lease_s / _RENEWALS)
        self._clock = clock
        self._renewed_s = -float("inf")
        self._renewals = 0
        self._known: object = None
        self.number = claims.claim_term()

    def check(self) -> None:
        """Check that this provisioner has the lease, and renew it if a renewal is due. Raises FencedError if another
        provisioner has claimed the job, and CheckpointError if the claims cannot be read."""
        newest = self._claims.newest_term()
        if newest > self.number:
            raise self._over(newest)
        self.renew_if_due()

    def renew_if_due(self) -> None:
        """Renew the lease if a part of its length has passed; call this method often. Raises the errors of `renew`."""
        if self._clock() - self._renewed_s >= self._every_s:
            self.renew()

    def renew(self, state: HolderState = "held") -> None:
        """Renew the lease, or record why this provisioner stops. Raises FencedError if another provisioner has taken
        over, CheckpointError if the store is not available."""
        self._renewed_s = self._clock()  # also after a failure, so that an unavailable store is not asked again at once
        self._renewals += 1
        data = msgspec.json.encode(Holder(self.number, self._renewals, state))
        for _ in range(_ATTEMPTS):
            renewed = self._claims.replace_document(DOCUMENT, data, self._known)
            if renewed is not None:
                self._known = renewed
                return
            content, known = self._claims.read_document(DOCUMENT)
            if (holder := _decoded(content)).provisioner > self.number:
                raise self._over(holder.provisioner)
            self._known = known
        raise CheckpointError(f"{self._claims.location}/{DOCUMENT} was changed {_ATTEMPTS} times while it was renewed")

    def end(self, state: HolderState) -> None:
        """Record why this provisioner stops, so that a standby need not wait. Raises FencedError, see `renew`."""
        try:
            self.renew(state)
        except CheckpointError as exc:
            log.warning("lease_not_ended", error=str(exc), action="a standby waits until it is over")

    def _over(self, newest: int) -> FencedError:
        return FencedError(
            f"provisioner {self.number} of this job is over: provisioner {newest} has taken its place; this "
            "process must stop (it leaves all instances as they are)"
        )


class LeaseWatch:
    """Determines whether the lease of another provisioner is over. Pure: `now` is any monotonic time in seconds."""

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._since_s = now
        self._seen: Holder | None = None

    def look(self, holder: Holder, now: float) -> Literal["held", "over", "ended"]:
        """Judge the lease by the current content of the document. If the first call saw the state `ended`, this state
        does not count, because the job may have started again."""
        begins, changed = self._seen is None, holder != self._seen
        self._seen = holder
        if changed:
            self._since_s = now
        if holder.state == "ended":
            return "over" if begins else "ended"
        if holder.state == "left" or now - self._since_s >= self._lease_s:
            return "over"
        return "held"

    def restart(self, now: float) -> None:
        """Start the lease time again, because the store is not available, so nobody can renew the lease."""
        self._since_s = now


def wait_for_lease(config: JobConfig, run_folder: Path, wait: Callable[[float], bool]) -> bool:
    """Wait until no other provisioner has the lease, and return True. Returns False if another provisioner has ended
    the job, or after a stop request. `wait(seconds)` waits, and returns False after a stop request. Raises
    CheckpointError if the store is not available at the start."""
    claims, lease_s = claims_of(config, run_folder), config.provision.lease_s
    with heartbeat_of("provisioner-standby", config) as heartbeat:
        heartbeat.set_waiting_for("the end of the other provisioner's lease (standby)")
        if claims.newest_term() == 0:
            return True  # there was never a provisioner
        watch = LeaseWatch(lease_s, time.monotonic())
        log.info("standby_waiting", lease_s=lease_s, provisioner=holder_of(claims).provisioner)
        while True:
            try:
                holder = holder_of(claims)
            except CheckpointError as exc:
                log.warning("lease_unreadable", error=str(exc), action="waiting for the store")
                watch.restart(time.monotonic())
            else:
                match watch.look(holder, time.monotonic()):
                    case "ended":
                        log.info("job_ended", provisioner=holder.provisioner, reason="the other one has ended it")
                        return False
                    case "over":
                        log.warning("provisioner_silent", provisioner=holder.provisioner, state=holder.state,
                                    lease_s=lease_s, action="taking over")  # fmt: skip
                        return True
            if not wait(min(lease_s / _LOOKS, 2.0)):
                return False


def holder_of(claims: CheckpointStore) -> Holder:
    """Return the newest content of the lease document; an empty holder if there is none. Raises CheckpointError if the
    store is not available."""
    return _decoded(claims.read_document(DOCUMENT)[0])


def _decoded(content: bytes | None) -> Holder:
    if content is None:
        return Holder()
    try:
        return msgspec.json.decode(content, type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        # The claims decide which provisioner acts; an invalid document only delays a standby.
        log.warning("lease_unreadable", error=short(exc), action="as if nothing was written")
        return Holder()


def claims_of(config: JobConfig, run_folder: Path) -> CheckpointStore:
    """Return the store of the provisioners' claims and state: `provision-JOB/` beside the checkpoints. Raises
    CheckpointError if it is in S3 and boto3 cannot be set up."""
    return open_store(config, run_folder, f"provision-{config.job}")  # several jobs may use one folder
