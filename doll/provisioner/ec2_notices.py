"""Interruption notices of spot instances, two minutes ahead: EventBridge puts them into an SQS queue, this reads it.

The events carry no tags, so every spot instance of the account is in the queue: what is not ours is passed over. All
messages that are read are deleted. A notice that is lost costs nothing but time: the listing shows what has ended.

Source of the fields: Amazon EC2 User Guide, "EC2 Spot Instance interruption notices".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Final

from doll import telemetry
from doll.errors import ServiceUnavailableError

log = telemetry.get_logger(__name__)

NOTICE_S: Final = 120.0
_WARNING: Final = "EC2 Spot Instance Interruption Warning"
_REBALANCE: Final = "EC2 Instance Rebalance Recommendation"
_AT_ONCE: Final = 10  # what SQS gives at most
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
        """When, in Unix seconds, each of the instances `own` will be taken, by the notices since the last call.

        Raises:
            ServiceUnavailableError: the queue does not answer, or we may not read it.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        found: dict[str, float] = {}
        try:
            for _ in range(_MAX_ROUNDS):
                answer = self._client.receive_message(
                    QueueUrl=self._queue_url, MaxNumberOfMessages=_AT_ONCE, WaitTimeSeconds=0
                )
                messages = answer.get("Messages", ())
                if not messages:
                    break
                for message in messages:
                    self._read(message["Body"], own, found)
                self._client.delete_message_batch(
                    QueueUrl=self._queue_url,
                    Entries=[
                        {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                        for number, message in enumerate(messages)
                    ],
                )
        except (BotoCoreError, ClientError) as error:
            if not found:
                raise ServiceUnavailableError(f"SQS, reading interruption notices: {error}") from error
            log.warning("notices_not_deleted", reason=str(error))  # they come again, and say the same
        return found

    def close(self) -> None:
        self._client.close()

    def _read(self, body: str, own: Collection[str], found: dict[str, float]) -> None:
        try:
            event = json.loads(body)
            kind, id_ = event["detail-type"], event["detail"]["instance-id"]
            said_s = datetime.fromisoformat(event["time"]).timestamp() if "time" in event else self._clock()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("message_refused", reason=f"{type(error).__name__}: {error}", body=body[:200])
            return
        if id_ not in own:
            return
        if kind == _WARNING:
            # The same event may come twice; the first notice is the one that counts.
            found[id_] = min(found.get(id_, said_s + NOTICE_S), said_s + NOTICE_S)
        elif kind == _REBALANCE:
            # A hint with many false alarms (docs/aws.md): told, never acted upon.
            log.info("rebalance_recommended", id=id_)
