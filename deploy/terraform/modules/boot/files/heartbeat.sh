#!/bin/bash
# Each minute: which roles of this host are silent, for the alarms. While the parameter server runs also a sign of life for
# the workers, how many of them there are, and what the provisioner measures for the dashboard. Workers are counted by
# tag and state, not as the provisioner sees it: an alarm must not depend on what it watches.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# name of a role, port of its probes: 1 where it should work and does not, 0 where it works, has ended or was stopped
silent() {
  case $(systemctl is-active "doll-role@$1" || true) in
    active)
      if curl --silent --fail --output /dev/null --max-time 3 "http://127.0.0.1:$2/healthz"; then echo 0; else echo 1; fi
      ;;
    inactive) echo 0 ;;
    *) echo 1 ;;
  esac
}

told="" provisioner=1
for role in ps:8080 evaluate:8081 provision:8082; do
  value=$(silent "${role%:*}" "${role#*:}")
  if [ "${role%:*}" = provision ]; then provisioner=$value; fi
  told+="${told:+,}{\"MetricName\":\"RoleSilent\",\"Value\":$value,\"Dimensions\":[{\"Name\":\"Cluster\",\"Value\":\"$DOLL_STACK_NAME\"},"
  told+="{\"Name\":\"Role\",\"Value\":\"${role%:*}\"}]}"
done
aws cloudwatch put-metric-data --namespace DOLL --metric-data "[$told]"

if [ -z "$(docker ps --quiet --filter name=^doll-ps$)" ]; then
  say "no parameter server runs: no sign of life"
  exit 0
fi
# A budget is kept by the provisioner alone. Where it fails for good, workers are given no sign of life: they power
# themselves off after DOLL_ORPHAN_TIMEOUT_S, and what the job has learned stays.
if [ "$provisioner" = 1 ] && grep --quiet 'budget_usd: *[0-9]' "$state/job/job.yaml"; then
  say "the provisioner is silent and the job has a budget: no sign of life for the workers"
else
  date +%s > "$run/heartbeat"
  aws s3 cp --quiet "$run/heartbeat" "s3://$(setting DOLL_BOOT_BUCKET)/job/heartbeat"
fi
count=$(aws ec2 describe-instances --query 'Reservations[].Instances[].InstanceId' --output text \
  --filters "Name=tag:doll:cluster,Values=$DOLL_STACK_NAME" Name=instance-state-name,Values=running | wc --words)
aws cloudwatch put-metric-data --namespace DOLL --metric-name WorkersRunning --unit Count --value "$count" \
  --dimensions "Cluster=$DOLL_STACK_NAME"

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
]))' "$DOLL_STACK_NAME" availability instances_spot spent_usd all_on_demand_usd <<< "$told")"
