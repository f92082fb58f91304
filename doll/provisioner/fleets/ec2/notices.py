"""Interruption notices of spot instances, two minutes in advance: read from an SQS queue, which EventBridge fills.

The queue has events of all spot instances of the account, without tags; events of other instances are deleted. A notice
for the job stays in the queue until the queue's retention removes it (300 s in Terraform), so a crash loses no notice.

Source of the fields: Amazon EC2 User Guide, "EC2 Spot Instance interruption notices".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from doll import telemetry
from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.ec2.client import aws_errors
from doll.records.bounded import MalformedError, json_object, short

log = telemetry.get_logger(__name__)

NOTICE_S: Final = 120.0
AGAIN_S: Final = 45
"""Visibility timeout of a notice: longer than a turn, and shorter than half of the notice's two minutes."""
UNLISTED_S: Final = 60.0
"""Time for which a notice for an unknown instance is kept, because listings may lag after a restart."""
_WARNING: Final = "EC2 Spot Instance Interruption Warning"
_REBALANCE: Final = "EC2 Instance Rebalance Recommendation"
_MAX_CHARS: Final = 1_048_576  # of a message, as SQS has it
_MAX_MESSAGES: Final = 10  # what SQS gives at most
_MAX_ROUNDS: Final = 50  # a queue that fills faster than it is read must not hold up the provisioner


@dataclass
class Ec2Notices:
    """Reads notices from the queue, without waiting. `clock` returns Unix seconds, for events without a time."""

    client: Any
    queue_url: str
    clock: Callable[[], float] = time.time

    def read(self, own: Collection[str]) -> Mapping[str, float]:
        """Return the Unix time at which each of the instances `own` will be interrupted. A notice may be returned more
        than once, always with the same time. Raises ServiceUnavailableError if the queue cannot be read."""
        interrupted_at_s: dict[str, float] = {}
        try:
            for _ in range(_MAX_ROUNDS):
                answer = self.client.receive_message(
                    QueueUrl=self.queue_url, MaxNumberOfMessages=_MAX_MESSAGES, WaitTimeSeconds=0,
                    VisibilityTimeout=AGAIN_S,
                )  # fmt: skip
                messages = answer.get("Messages", ())
                if not messages:
                    break
                handles = [
                    message["ReceiptHandle"]
                    for message in messages
                    if self._enter(message["Body"], own, interrupted_at_s)
                ]
                if handles:
                    self.client.delete_message_batch(
                        QueueUrl=self.queue_url,
                        Entries=[{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles)],
                    )
        except aws_errors() as error:
            if not interrupted_at_s:
                raise ServiceUnavailableError(f"SQS, reading interruption notices: {error}") from error
            log.warning("notices_not_deleted", reason=str(error))  # they are received again, with the same times
        return interrupted_at_s

    def close(self) -> None:
        self.client.close()

    def _enter(self, body: str, own: Collection[str], interrupted_at_s: dict[str, float]) -> bool:
        """Add a notice to `interrupted_at_s`. Returns whether the message can be deleted."""
        try:
            event = json_object(body, max_chars=_MAX_CHARS)
            kind, id_ = event["detail-type"], event["detail"]["instance-id"]
            if not (isinstance(kind, str) and isinstance(id_, str)):
                raise MalformedError("expected text in detail-type and instance-id")
            said_s = datetime.fromisoformat(event["time"]).timestamp() if "time" in event else self.clock()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            log.warning("message_refused", reason=f"{type(error).__name__}: {short(error)}", body=body[:200])
            return True
        if kind == _REBALANCE and id_ in own:
            # A hint with many false alarms (docs/aws.md): logged, never acted on.
            log.info("rebalance_recommended", id=id_)
        if kind != _WARNING:
            return True
        if id_ not in own:
            return self.clock() - said_s > UNLISTED_S
        # The same event may arrive twice; the first one counts.
        interrupted_at_s[id_] = min(interrupted_at_s.get(id_, said_s + NOTICE_S), said_s + NOTICE_S)
        return False
