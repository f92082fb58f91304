#!/bin/bash
# Hand all workers back and see that none is left: run it before `terraform destroy`, which knows nothing of them. The
# provisioner is stopped first, and stays so: it would buy others.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

systemctl disable --now doll-role@provision
run_doll doll-drain 8083 provision drain --run-folder /var/lib/doll
