#!/bin/bash
# Shut down without a heartbeat of the parameter server for DOLL_ORPHAN_TIMEOUT_S seconds, independently of everything else
# on this machine: the provisioner, which manages it, runs on the parameter server's host. The heartbeat is an object in the
# bucket that the control host rewrites every minute (heartbeat.sh). Only changes of it count, so clocks need not agree.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# Nothing is installed here, so the time also runs if the network fails from the start.
seen_s=$SECONDS last=""
while ((SECONDS - seen_s < DOLL_ORPHAN_TIMEOUT_S)); do
  sleep "${DOLL_HEARTBEAT_POLL_S:-60}"
  now=$(aws s3api head-object --bucket "$DOLL_BUCKET" --key job/heartbeat --query LastModified --output text) || continue
  if [ "$now" != "$last" ]; then seen_s=$SECONDS last=$now; fi
done
say "shutting down: no heartbeat of the parameter server for $DOLL_ORPHAN_TIMEOUT_S s"
systemctl poweroff
