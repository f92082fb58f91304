"""Interruption notices of spot instances, two minutes ahead: EventBridge puts them into an SQS queue, this reads it.

The events carry no tags, so every spot instance of the account is in the queue: what is not ours is deleted. A notice
of ours stays until its instance has ended, and is read again and again: whoever dies between reading and acting loses
nothing, as its successor reads the same. The queue forgets by itself (`message_retention_seconds`, 300 in Terraform).

Source of the fields: Amazon EC2 User Guide, "EC2 Spot Instance interruption notices".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Final

from doll import telemetry
from doll.bounded import MalformedError, json_object, short
from doll.errors import ServiceUnavailableError

log = telemetry.get_logger(__name__)

NOTICE_S: Final = 120.0
AGAIN_S: Final = 45
"""A notice that is kept comes again after so long: more than a turn, and less than half of its time."""
UNLISTED_S: Final = 60.0
"""A notice of a stranger is kept for so long: an instance of a predecessor that died may not be listed yet."""
_WARNING: Final = "EC2 Spot Instance Interruption Warning"
_REBALANCE: Final = "EC2 Instance Rebalance Recommendation"
_MOST_CHARS: Final = 1_048_576  # of a message, as SQS has it
_MAX_MESSAGES: Final = 10  # what SQS gives at most
_MAX_ROUNDS: Final = 50  # a queue that fills faster than it is read must not hold up the provisioner


class Ec2Notices:
    """Polls when it is asked, and does not wait: the provisioner asks several times a minute.

    Args:
        client: boto3's SQS client.
        queue_url: of the queue that EventBridge's rule writes to.
        clock: Unix seconds, where an event says no time.
    """

    def __init__(self, client: Any, queue_url: str, *, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._queue_url = queue_url
        self._clock = clock

    def take(self, own: Collection[str]) -> Mapping[str, float]:
        """When, in Unix seconds, each of the instances `own` will be taken, by the notices that are to be read now.

        What was told before may be told again, in the same words.

        Raises:
            ServiceUnavailableError: the queue does not answer, or we may not read it.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        taken_at_s: dict[str, float] = {}
        try:
            for _ in range(_MAX_ROUNDS):
                answer = self._client.receive_message(
                    QueueUrl=self._queue_url, MaxNumberOfMessages=_MAX_MESSAGES, WaitTimeSeconds=0,
                    VisibilityTimeout=AGAIN_S,
                )  # fmt: skip
                messages = answer.get("Messages", ())
                if not messages:
                    break
                over = [
                    message["ReceiptHandle"] for message in messages if self._read(message["Body"], own, taken_at_s)
                ]
                if over:
                    self._client.delete_message_batch(
                        QueueUrl=self._queue_url,
                        Entries=[{"Id": str(number), "ReceiptHandle": one} for number, one in enumerate(over)],
                    )
        except (BotoCoreError, ClientError) as error:
            if not taken_at_s:
                raise ServiceUnavailableError(f"SQS, reading interruption notices: {error}") from error
            log.warning("notices_not_deleted", reason=str(error))  # they come again, and say the same
        return taken_at_s

    def close(self) -> None:
        self._client.close()

    def _read(self, body: str, own: Collection[str], taken_at_s: dict[str, float]) -> bool:
        """Enter what the message says; whether nobody needs it any more."""
        try:
            event = json_object(body, max_chars=_MOST_CHARS)
            kind, id_ = event["detail-type"], event["detail"]["instance-id"]
            if not (isinstance(kind, str) and isinstance(id_, str)):
                raise MalformedError("expected text in detail-type and instance-id")
            said_s = datetime.fromisoformat(event["time"]).timestamp() if "time" in event else self._clock()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            log.warning("message_refused", reason=f"{type(error).__name__}: {short(error)}", body=body[:200])
            return True
        if kind == _REBALANCE and id_ in own:
            # A hint with many false alarms (docs/aws.md): told, never acted upon.
            log.info("rebalance_recommended", id=id_)
        if kind != _WARNING:
            return True
        if id_ not in own:
            return self._clock() - said_s > UNLISTED_S
        # The same event may come twice; the first notice is the one that counts.
        taken_at_s[id_] = min(taken_at_s.get(id_, said_s + NOTICE_S), said_s + NOTICE_S)
        return False
