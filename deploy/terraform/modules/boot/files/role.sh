#!/bin/bash
# ps, evaluate, provision, join or shard-N, in the foreground. Their probes are on the host's loopback, one port each.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

case $1 in
  ps) port=8080 words=(ps) ;;
  evaluate) port=8081 words=(evaluate) ;;
  provision) port=8082 words=(provision run) ;;
  join) port=8084 words=(join) ;;
  shard-[0-9] | shard-[0-9][0-9]) port=$((8090 + ${1#shard-})) words=(shard --shard "${1#shard-}") ;;
  *)
    say "expected ps, evaluate, provision, join or shard-N, got $1"
    exit 2
    ;;
esac
run_doll "doll-$1" "$port" "${words[@]}" --run-folder /var/lib/doll
