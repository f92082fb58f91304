#!/bin/bash
# Each minute, while the parameter server runs: a sign of life for the workers, and how many of them there are for the
# alarm. Counted by tag and state, not as the provisioner sees it: an alarm must not depend on what it watches.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

if [ -z "$(docker ps --quiet --filter name=^doll-ps$)" ]; then
  say "no parameter server runs: no sign of life"
  exit 0
fi
date +%s > "$run/heartbeat"
aws s3 cp --quiet "$run/heartbeat" "s3://$(setting DOLL_BOOT_BUCKET)/job/heartbeat"
count=$(aws ec2 describe-instances --query 'Reservations[].Instances[].InstanceId' --output text \
  --filters "Name=tag:doll:cluster,Values=$DOLL_NAME" Name=instance-state-name,Values=running | wc --words)
aws cloudwatch put-metric-data --namespace DOLL --metric-name WorkersRunning --unit Count --value "$count" \
  --dimensions "Cluster=$DOLL_NAME"
