#!/bin/bash
# Every minute: which roles of this host are silent, for the alarms. While the parameter server runs also a heartbeat for
# the workers, their number, and the provisioner's metrics for the dashboard. Workers are counted by tag and state, not
# by the provisioner: an alarm must not depend on what it monitors.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# command of a role, port of its probes: 1 if it should work and does not, 0 if it works, has ended or was stopped
silent() {
  case $(systemctl is-active "doll-role@$1" || true) in
    active)
      if curl --silent --fail --output /dev/null --max-time 3 "http://127.0.0.1:$2/healthz"; then echo 0; else echo 1; fi
      ;;
    inactive) echo 0 ;;
    *) echo 1 ;;
  esac
}

metrics="" provisioner=1
shards=$(sed -n 's/^ps\.shards=//p' "$run/settings" 2> /dev/null || true)
for entry in ps:ps:8080 evaluator:evaluate:8081 provisioner:provision:8082; do
  IFS=: read -r role command port <<< "$entry"
  value=$(silent "$command" "$port")
  if [ "$role" = provisioner ]; then provisioner=$value; fi
  # The parameter server waits for a shard that is lost, and nothing is learned.
  for ((number = 0; shards > 1 && number < shards; number++)); do
    if [ "$role" = ps ] && [ "$(silent "shard-$number" $((8090 + number)))" = 1 ]; then value=1; fi
  done
  metrics+="${metrics:+,}{\"MetricName\":\"RoleSilent\",\"Value\":$value,\"Dimensions\":[{\"Name\":\"Cluster\",\"Value\":\"$DOLL_STACK_NAME\"},"
  metrics+="{\"Name\":\"Role\",\"Value\":\"$role\"}]}"
done
aws cloudwatch put-metric-data --namespace DOLL --metric-data "[$metrics]"

if [ -z "$(docker ps --quiet --filter name=^doll-ps$)" ]; then
  say "no parameter server runs: no heartbeat"
  exit 0
fi
# Only the provisioner enforces a budget. If it keeps failing, workers get no heartbeat: they shut down after
# DOLL_ORPHAN_TIMEOUT_S, and the model is kept.
if [ "$provisioner" = 1 ] && grep --quiet 'budget_usd: *[0-9]' "$state/job/job.yaml"; then
  say "the provisioner is silent and the job has a budget: no heartbeat for the workers"
else
  date +%s > "$run/heartbeat"
  aws s3 cp --quiet "$run/heartbeat" "s3://$(setting DOLL_BOOT_BUCKET)/job/heartbeat"
fi
count=$(aws ec2 describe-instances --query 'Reservations[].Instances[].InstanceId' --output text \
  --filters "Name=tag:doll:cluster,Values=$DOLL_STACK_NAME" Name=instance-state-name,Values=running | wc --words)
aws cloudwatch put-metric-data --namespace DOLL --metric-name WorkersRunning --unit Count --value "$count" \
  --dimensions "Cluster=$DOLL_STACK_NAME"

# For the dashboard: metrics of the provisioner's newest decision, named as in `doll prometheus`. They are read in its
# container, so the graphs end if none runs.
if ! status=$(timeout 30 docker exec doll-provision \
  doll provision status --json --job /job/job.yaml --run-folder /var/lib/doll); then
  say "no decision of a provisioner: no metrics of it"
  exit 0
fi
aws cloudwatch put-metric-data --namespace DOLL --metric-data "$(python3 -c '
import json, sys
decision, (cluster, *names) = json.load(sys.stdin), sys.argv[1:]
dimensions = [{"Name": "Cluster", "Value": cluster}]
number = lambda value: len(value) if isinstance(value, list) else value  # alarms are texts
print(json.dumps([
    {"MetricName": f"doll_provisioner_{name}", "Value": number(decision[name]), "Timestamp": decision["time_s"], "Dimensions": dimensions}
    for name in names if name in decision
]))' "$DOLL_STACK_NAME" availability instances_spot spent_usd all_on_demand_usd alarms <<< "$status")"
