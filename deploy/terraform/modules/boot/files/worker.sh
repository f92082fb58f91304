#!/bin/bash
# Run one worker until it ends, then shut the machine down. Slot and incarnation are in the instance's tags, which
# `doll worker --from-imds` reads; it also polls for an interruption notice.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# Exit codes without a retry: finished, invalid job file, infeasible plan.
final() { [[ $1 == 0 || $1 == 2 || $1 == 3 ]]; }

get_settings worker cache
get_doll

code=1
for attempt in 1 2 3 4 5; do
  code=0
  run_doll doll-worker 8080 worker --from-imds || code=$?
  say "attempt $attempt: exit code $code"
  if final "$code"; then break; fi
  sleep "$pause_s"
done
# A machine that EC2 interrupts in its first hour is free, one that shuts down is not: with a notice, wait for EC2.
if metadata spot/instance-action > /dev/null; then
  say "interruption notice: waiting for EC2 to stop this machine"
  sleep "${DOLL_INTERRUPTION_WAIT_S:-300}"
fi
say "shutting down: the worker has ended"
systemctl poweroff
