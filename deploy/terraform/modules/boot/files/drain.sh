#!/bin/bash
# Terminate all workers and wait until they are gone. Run it before `terraform destroy`, which does not know them. The
# provisioner is stopped and disabled first, since it would launch new ones.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

systemctl disable --now doll-role@provision
run_doll doll-drain 8083 provision drain --run-folder /var/lib/doll
