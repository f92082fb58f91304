#!/bin/bash
# Each minute, while the parameter server runs: a sign of life for the workers, how many of them there are for the alarm,
# and what the provisioner measures for the dashboard. Workers are counted by tag and state, not as the provisioner sees
# it: an alarm must not depend on what it watches.
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

# For the dashboard: measurements of the provisioner's last turn, under the names that `doll prometheus` gives them. From
# inside its container: where none runs, the graphs end.
if ! told=$(timeout 30 docker exec doll-provision \
  doll provision status --json --job /job/job.yaml --run-folder /var/lib/doll); then
  say "no provisioner has decided anything: nothing told of it"
  exit 0
fi
aws cloudwatch put-metric-data --namespace DOLL --metric-data "$(python3 -c '
import json, sys
found, (cluster, *names) = json.load(sys.stdin), sys.argv[1:]
of = [{"Name": "Cluster", "Value": cluster}]
print(json.dumps([
    {"MetricName": f"doll_provisioner_{name}", "Value": found[name], "Timestamp": found["time_s"], "Dimensions": of}
    for name in names if name in found
]))' "$DOLL_NAME" availability instances_spot spent_usd on_demand_usd <<< "$told")"
