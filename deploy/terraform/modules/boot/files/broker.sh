#!/bin/bash
# One node of the self-managed Kafka: KRaft, broker and controller in one process. Clients authenticate with SCRAM-SHA-512
# over TLS, nodes with certificates of the stack's authority, which node 1 creates. Users without an ACL have no access:
# the control host's user is a super user, and doll adds ACLs per topic for the users of workers and of external producers.
# Runs at each boot: certificates are new each time, data and cluster id stay on the data volume.
# shellcheck source=common.sh
. "${DOLL_ROOT:-}/opt/doll/common.sh"

kafka=$root/var/lib/kafka # the data volume
conf=$run/kafka
kafka_uid=1000 # appuser of apache/kafka

# The volume is attached after the machine has started; it is formatted once, if it is empty.
mount_volume() {
  local device=$root/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${DOLL_VOLUME_ID//-/}
  mountpoint --quiet "$kafka" && return
  [ -b "$device" ] || return
  if [ -z "$(blkid --probe --output value --match-tag TYPE "$device")" ]; then mkfs.xfs -q "$device" || return; fi
  mkdir -p "$kafka" && mount -o noatime "$device" "$kafka"
}

# All nodes of a cluster need the same id; it is derived from the authority, which they share.
cluster_id() { openssl x509 -in "$conf/ca.pem" -outform DER | openssl dgst -md5 -binary | base64 | tr '+/' '-_' | tr -d '='; }

properties() {
  local copies=$((DOLL_NODES < 3 ? 1 : 3)) in_sync=$((DOLL_NODES < 3 ? 1 : 2))
  cat << PROPERTIES
process.roles=broker,controller
node.id=$DOLL_NODE
controller.quorum.voters=$DOLL_VOTERS
controller.listener.names=CONTROLLER
listeners=CLIENT://$DOLL_PRIVATE_IP:9092,INTERNAL://$DOLL_PRIVATE_IP:9091,CONTROLLER://$DOLL_PRIVATE_IP:9093
advertised.listeners=CLIENT://$DOLL_PRIVATE_IP:9092,INTERNAL://$DOLL_PRIVATE_IP:9091
inter.broker.listener.name=INTERNAL
listener.security.protocol.map=CLIENT:SASL_SSL,INTERNAL:SSL,CONTROLLER:SSL
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.client.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
ssl.keystore.type=PEM
ssl.keystore.location=$conf/server.pem
ssl.truststore.type=PEM
ssl.truststore.location=$conf/ca.pem
listener.name.internal.ssl.client.auth=required
listener.name.controller.ssl.client.auth=required
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:CN=doll-broker;User:$(secret DOLL_KAFKA_USERNAME)
log.dirs=$kafka/data
auto.create.topics.enable=false
num.partitions=1
default.replication.factor=$copies
min.insync.replicas=$in_sync
offsets.topic.replication.factor=$copies
transaction.state.log.replication.factor=$copies
transaction.state.log.min.isr=$in_sync
share.coordinator.state.topic.replication.factor=$copies
share.coordinator.state.topic.min.isr=$in_sync
message.max.bytes=33554432
replica.fetch.max.bytes=33554432
PROPERTIES
}

kafka_run() {
  docker run --rm --network host --user "$kafka_uid:$kafka_uid" --cap-drop ALL --security-opt no-new-privileges \
    --volume "$conf:$conf:ro" --volume "$kafka:$kafka" --env LOG_DIR=/tmp/kafka "$@"
}

# file of a secret: one user, as arguments for kafka-storage.sh, one per line
scram_user() {
  printf -- '--add-scram\nSCRAM-SHA-512=[name=%s,password=%s]\n' \
    "$(sed -n 's/^DOLL_KAFKA_USERNAME=//p' "$1")" "$(sed -n 's/^DOLL_KAFKA_PASSWORD=//p' "$1")"
}

# The users are written to the initial metadata, before the first client connects. A node with data has them already.
# The tool reads them from a file, because every user of a machine can read the arguments of a command.
format_data() {
  local code=0
  [ -f "$kafka/data/meta.properties" ] && return
  local user
  scram_user "$run/secrets" > "$conf/users"
  for user in worker producer; do
    insist fetch_secret "$user" "$run/$user"
    scram_user "$run/$user" >> "$conf/users"
    rm -f "$run/$user"
  done
  chown "$kafka_uid:$kafka_uid" "$conf/users"
  kafka_run "$(setting DOLL_BOOT_KAFKA_IMAGE)" /opt/kafka/bin/kafka-storage.sh format "--cluster-id=$(cluster_id)" \
    --config "$conf/server.properties" "@$conf/users" || code=$?
  rm -f "$conf/users"
  return "$code"
}

get_settings clients
need openssl openssl
insist mount_volume
rm -rf "$conf" && mkdir -p "$conf"
authority "$conf" "doll/$DOLL_STACK_NAME/kafka-authority" kafka "$([ "$DOLL_NODE" = 1 ] && echo create || echo await)"
certificate "$conf" doll-broker "$DOLL_PRIVATE_IP"
properties > "$conf/server.properties"
mkdir -p "$kafka/data"
chown -R "$kafka_uid:$kafka_uid" "$conf" "$kafka/data"
insist pull "$(setting DOLL_BOOT_KAFKA_IMAGE)"
insist format_data

# Half of the memory for Java's heap, up to 6 GB; the rest caches the log.
heap_mb=$(awk '/^MemTotal:/ {mb = int($2 / 2048); print (mb > 6144 ? 6144 : mb)}' /proc/meminfo)
docker rm --force doll-kafka > /dev/null 2>&1 || true
kafka_run --name doll-kafka --ulimit nofile=100000:100000 --env "KAFKA_HEAP_OPTS=-Xms${heap_mb}m -Xmx${heap_mb}m" \
  --log-driver awslogs --log-opt "awslogs-group=$(setting DOLL_BOOT_LOG_GROUP)" --log-opt "awslogs-region=$AWS_REGION" \
  --log-opt "awslogs-stream=kafka-$DOLL_NODE" \
  "$(setting DOLL_BOOT_KAFKA_IMAGE)" /opt/kafka/bin/kafka-server-start.sh "$conf/server.properties"
