#!/bin/bash
# Power off when the parameter server has been gone for DOLL_ORPHAN_TIMEOUT_S seconds, whatever else happens or hangs on this
# machine: its owner, the provisioner, lives where the parameter server does. A sign of life is an object in the bucket
# that the control host writes anew each minute (heartbeat.sh). Only changes of it count, so clocks need not agree.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# No need of our own is installed here: where the network fails from the start, the time runs all the same.
seen_s=$SECONDS last=""
while ((SECONDS - seen_s < DOLL_ORPHAN_TIMEOUT_S)); do
  sleep "${DOLL_HEARTBEAT_POLL_S:-60}"
  now=$(aws s3api head-object --bucket "$DOLL_BUCKET" --key job/heartbeat --query LastModified --output text) || continue
  if [ "$now" != "$last" ]; then seen_s=$SECONDS last=$now; fi
done
say "powering off: no sign of life of the parameter server for $DOLL_ORPHAN_TIMEOUT_S s"
systemctl poweroff
