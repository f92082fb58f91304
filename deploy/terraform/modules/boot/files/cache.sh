#!/bin/bash
# Valkey with TLS: a cache without persistence, of DOLL_BOOT_CACHE_MB. It does not evict keys: doll's keys expire by their
# time to live, and a refused write is reported and retried.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

image=$(setting DOLL_BOOT_CACHE_IMAGE)
if [ -z "$image" ]; then
  say "the cache is not self-managed"
  exit 0
fi
docker rm --force doll-cache > /dev/null 2>&1 || true
exec docker run --rm --name doll-cache --network host --user "$uid:$uid" --read-only --cap-drop ALL \
  --security-opt no-new-privileges --volume "$run/cache:$run/cache:ro" "$image" valkey-server \
  --bind "$DOLL_PRIVATE_IP" --port 0 --tls-port 6379 --tls-auth-clients no --tls-protocols "TLSv1.2 TLSv1.3" \
  --tls-cert-file "$run/cache/server.crt" --tls-key-file "$run/cache/server.key" --tls-ca-cert-file "$run/cache/ca.pem" \
  --aclfile "$run/cache/users.acl" --maxmemory "$(setting DOLL_BOOT_CACHE_MB)mb" --maxmemory-policy noeviction \
  --save "" --appendonly no --dir /tmp
