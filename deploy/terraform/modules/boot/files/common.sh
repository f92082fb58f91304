# shellcheck shell=bash
# Functions of every host's boot scripts. Sourced by the other scripts, which cloud-init writes to /opt/doll.
#
# Settings come from two SSM parameters: `environment` (a docker env file) and `settings` (`--set` lines for doll).
# Passwords come from secrets, also docker env files, of which each kind of host reads its own (iam.tf), and are written to a
# folder in memory that only root can read.
# So user data contains neither, and a host picks up changes when its services restart.

set -euo pipefail
umask 077

root=${DOLL_ROOT:-} # a folder, in tests
run=$root/run/doll
state=$root/var/lib/doll
uid=10001 # of the image's user
pause_s=${DOLL_RETRY_INTERVAL_S:-10}

# DOLL_STACK_NAME, AWS_REGION and the settings of the host's role
# shellcheck source=/dev/null
. "$root/etc/doll/boot.env"
export AWS_REGION AWS_DEFAULT_REGION=$AWS_REGION AWS_PAGER=""

say() { printf 'doll: %s\n' "$*" >&2; }

# Retry until it works: at boot, roles, endpoints and other hosts may take minutes. The journal shows what it waits for.
insist() {
  until "$@"; do
    say "retrying in $pause_s s: $1"
    sleep "$pause_s"
  done
}

# program, package
need() { command -v "$1" > /dev/null || insist dnf install --assumeyes --quiet "$2"; }

# name of the parameter, file
parameter() {
  aws ssm get-parameter --name "/doll/$DOLL_STACK_NAME/$1" --query Parameter.Value --output text > "$2.new" && mv "$2.new" "$2"
}

# name of a variable: its value in the parameter `environment`
setting() { sed -n "s/^$1=//p" "$run/environment"; }

# name of a variable: its value in the secrets, the last one if several have it
secret() { sed -n "s/^$1=//p" "$run/secrets" | tail -n 1; }

fetch_environment() {
  mkdir -p "$run/ca" "$state"
  chmod 755 "$run" "$run/ca" "$state"
  parameter environment "$run/environment" && parameter settings "$run/settings"
}

# name of the secret, file
fetch_secret() {
  aws secretsmanager get-secret-value --secret-id "doll/$DOLL_STACK_NAME/$1" --query SecretString --output text > "$2.new" &&
    mv "$2.new" "$2"
}

# The certificates of the stack's own authorities, which sign the certificates of Kafka and the cache.
fetch_authorities() {
  local object
  for object in $(setting DOLL_BOOT_CERT_AUTHORITIES); do
    aws s3 cp --quiet "s3://$(setting DOLL_BOOT_BUCKET)/ca/$object.pem" "$run/ca/$object.pem" || return
    chmod 644 "$run/ca/$object.pem"
  done
}

# image, from the stack's registry or a public one
pull() {
  if [[ $1 == *.dkr.ecr.* ]]; then
    aws ecr get-login-password | docker login --username AWS --password-stdin "${1%%/*}" > /dev/null || return
  fi
  docker pull --quiet "$1" > /dev/null
}

# job.tar.gz: job.yaml, and the files that it names (for example the task's Python file)
fetch_job() {
  local new=$state/job.new
  rm -rf "$new" && mkdir -p "$new" &&
    aws s3 cp --quiet "s3://$(setting DOLL_BOOT_BUCKET)/job/job.tar.gz" "$state/job.tar.gz" &&
    tar --extract --gzip --no-same-owner --file "$state/job.tar.gz" --directory "$new" || return
  if [ ! -f "$new/job.yaml" ]; then
    say "expected job.yaml at the top of job.tar.gz"
    return 1
  fi
  chmod -R u=rwX,go=rX "$new" && rm -rf "$state/job" && mv "$new" "$state/job"
}

# The first step of every host. Names of the secrets whose values its containers get.
get_settings() {
  local name
  need aws awscli-2
  insist fetch_environment
  : > "$run/secrets.all"
  for name in "$@"; do
    insist fetch_secret "$name" "$run/secrets.one"
    cat "$run/secrets.one" >> "$run/secrets.all"
  done
  rm -f "$run/secrets.one"
  mv "$run/secrets.all" "$run/secrets"
}

# Prerequisites of run_doll. At the first apply, image and job are pushed after the hosts have started, so it waits for them,
# and for the log-in of the schema registry, if there is to be one.
get_doll() {
  insist fetch_authorities
  rm -f "$run/schema-registry"
  if [ -n "$(setting DOLL_BOOT_SCHEMA_REGISTRY_LOGIN)" ]; then insist fetch_secret schema-registry "$run/schema-registry"; fi
  insist pull "$(setting DOLL_BOOT_IMAGE)"
  insist fetch_job
  mkdir -p "$state/run"
  chown "$uid:$uid" "$state/run"
}

# name of the container, port of its probes, arguments of doll: run it in the foreground. Exit code: the command's.
run_doll() {
  local name=$1 port=$2 line job files=(--env-file "$run/environment" --env-file "$run/secrets")
  shift 2
  # Only workers ask the schema registry, and the commands of people: `doll doctor`.
  if [[ -f $run/schema-registry && $name =~ ^doll-(worker$|command-) ]]; then files+=(--env-file "$run/schema-registry"); fi
  # Each job has its own checkpoints: those of another job would be refused.
  job=$(sed -n "s/^job: *[\"']\{0,1\}\([A-Za-z0-9_-]*\).*/\1/p" "$state/job/job.yaml")
  local sets=(--set "checkpoint.folder=s3://$(setting DOLL_BOOT_BUCKET)/checkpoints/${job:?expected job: NAME in job.yaml}")
  sets+=(--set log.format=json) # CloudWatch Logs Insights finds the fields of JSON by itself
  while IFS= read -r line; do
    if [ -n "$line" ]; then sets+=(--set "$line"); fi
  done < "$run/settings"
  docker rm --force "$name" > /dev/null 2>&1 || true
  # Containers share the host's network: the metadata service is one hop away, and no port is published.
  docker run --rm --init --name "$name" --network host --user "$uid:$uid" --read-only --tmpfs /tmp --cap-drop ALL \
    --security-opt no-new-privileges "${files[@]}" \
    --env "AWS_REGION=$AWS_REGION" --env "DOLL_HEALTH_PORT=$port" \
    --volume "$state/job:/job:ro" --volume "$run/ca:/run/doll/ca:ro" --volume "$state/run:/var/lib/doll" \
    --log-driver awslogs --log-opt "awslogs-group=$(setting DOLL_BOOT_LOG_GROUP)" \
    --log-opt "awslogs-region=$AWS_REGION" --log-opt "awslogs-stream=$name-$(metadata instance-id)" \
    "$(setting DOLL_BOOT_IMAGE)" "$@" --job /job/job.yaml "${sets[@]}"
}

# path below meta-data
metadata() {
  local imds=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254} token
  token=$(curl --silent --fail --max-time 5 --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
    "${imds%/}/latest/api/token") &&
    curl --silent --fail --max-time 5 --header "X-aws-ec2-metadata-token: $token" "${imds%/}/latest/meta-data/$1"
}

# folder, secret of the authority's key, name, `create` or `await`: the stack's certificate authority in the folder.
# One host creates it, once; all others wait for it. The certificate is uploaded to the bucket for clients.
authority() {
  local folder=$1 secret=$2 name=$3 mode=$4 output
  while :; do
    if output=$(aws secretsmanager get-secret-value --secret-id "$secret" --query SecretString --output text 2>&1 > "$folder/authority.pem"); then
      break
    fi
    # Only if the secret certainly has no value: a second authority would invalidate all certificates of the first.
    if [[ $mode == create && $output == *ResourceNotFoundException* ]]; then
      openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 -subj "/CN=DOLL $DOLL_STACK_NAME $name" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/new.key" -out "$folder/new.crt" 2> /dev/null
      cat "$folder/new.key" "$folder/new.crt" > "$folder/new.pem"
      aws secretsmanager put-secret-value --secret-id "$secret" --secret-string "file://$folder/new.pem" > /dev/null ||
        say "cannot store the new authority"
      rm -f "$folder"/new.*
    else
      say "waiting for the certificate authority: $output"
      sleep "$pause_s"
    fi
  done
  openssl x509 -in "$folder/authority.pem" -out "$folder/ca.pem"
  if [ "$mode" = create ]; then
    insist aws s3 cp --quiet "$folder/ca.pem" "s3://$(setting DOLL_BOOT_BUCKET)/ca/$name.pem"
  fi
}

# folder with an authority, common name, IP address: writes server.key (PKCS 8), server.crt and server.pem (both, then the
# authority's certificate). A new one at each start, valid for 398 days. The authority's key is deleted from the host.
certificate() {
  local folder=$1
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=$2" \
    -keyout "$folder/server.key" -out "$folder/server.csr" 2> /dev/null
  printf 'subjectAltName=IP:%s\nextendedKeyUsage=serverAuth,clientAuth\nkeyUsage=digitalSignature\n' "$3" > "$folder/server.ext"
  openssl x509 -req -in "$folder/server.csr" -CA "$folder/authority.pem" -CAkey "$folder/authority.pem" -days 398 \
    -extfile "$folder/server.ext" -out "$folder/server.crt" 2> /dev/null
  cat "$folder/server.key" "$folder/server.crt" "$folder/ca.pem" > "$folder/server.pem"
  rm -f "$folder/authority.pem" "$folder/server.csr" "$folder/server.ext"
}
