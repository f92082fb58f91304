#!/bin/bash
# Hand all workers back and see that none is left: run it before `terraform destroy`, which knows nothing of them.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

systemctl stop doll-role@provision # one provisioner at a time
run_doll doll-drain 8083 provision drain --run-folder /var/lib/doll
