#!/bin/bash
# Any command of doll on this host's job: doll.sh status, doll.sh audit, doll.sh provision status --run-folder /var/lib/doll
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

run_doll "doll-command-$$" 8083 "$@"
