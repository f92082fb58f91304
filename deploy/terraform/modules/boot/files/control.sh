#!/bin/bash
# Fetch the prerequisites of the control host's roles, and wait for those that do not exist yet.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

get_settings clients cache
if [ -n "$(setting DOLL_BOOT_CACHE_IMAGE)" ]; then
  # Certificate and user of the cache on this host; doll's user has access to its own keys only.
  need openssl openssl
  mkdir -p "$run/cache"
  authority "$run/cache" "doll/$DOLL_STACK_NAME/cache-authority" cache create
  certificate "$run/cache" doll-cache "$DOLL_PRIVATE_IP"
  hash=$(secret DOLL_REDIS_PASSWORD | tr -d '\n' | sha256sum | cut -d ' ' -f 1)
  printf 'user default off\nuser %s on #%s ~doll:* +@all -@dangerous\n' "$(secret DOLL_REDIS_USERNAME)" "$hash" \
    > "$run/cache/users.acl"
  chown -R "$uid:$uid" "$run/cache"
  insist pull "$(setting DOLL_BOOT_CACHE_IMAGE)"
fi
get_doll
