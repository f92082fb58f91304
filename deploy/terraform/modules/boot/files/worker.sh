#!/bin/bash
# One worker slot, until it ends; then the machine goes. The slot and its incarnation are in the instance's tags, which
# `doll worker --from-imds` reads; it also watches for the spot notice.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

# Exit codes that another try does not mend: finished, wrong job file, infeasible.
final() { [[ $1 == 0 || $1 == 2 || $1 == 3 ]]; }

get_settings
get_doll

code=1
for attempt in 1 2 3 4 5; do
  code=0
  run_doll doll-worker 8080 worker --from-imds || code=$?
  say "try $attempt has ended with exit code $code"
  if final "$code"; then break; fi
  sleep "$pause_s"
done
# A machine that EC2 takes in its first hour is free, one that ends itself is not: with a notice, wait to be taken.
if metadata spot/instance-action > /dev/null; then
  say "spot has given notice: waiting to be taken"
  sleep "${DOLL_INTERRUPTION_WAIT_S:-300}"
fi
say "powering off: nothing left to do here"
systemctl poweroff
