provider "aws" {
  region = var.region

  default_tags {
    # Not doll:cluster: that is the provisioner's tag, and it may terminate whatever carries it.
    tags = { "doll:stack" = var.name }
  }
}

# The same provider under an alias: Terraform 1.11 cannot mock ephemeral resources, so tests mock all others.
provider "aws" {
  alias  = "passwords"
  region = var.region
}

data "aws_partition" "this" {}

data "aws_caller_identity" "this" {}

data "aws_availability_zones" "this" {
  # checkov:skip=CKV_AWS_394: the first zone_count are used, by name; a zone that AWS adds comes last
  state = "available"

  # No local or wavelength zones: they have few instance types.
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

# Amazon Linux 2023 with docker, for each architecture in use.
data "aws_ssm_parameter" "ami" {
  for_each = toset([for type in [var.worker_instance_types[0], var.control_instance_type, var.kafka_instance_type] : local.arm64[type] ? "/arm64" : ""])

  name = "/aws/service/ecs/optimized-ami/amazon-linux-2023${each.key}/recommended/image_id"
}

locals {
  zones = slice(data.aws_availability_zones.this.names, 0, var.zone_count)

  # Graviton: a g behind the generation (m7g, c6gn, t4g, im4gn is i-m-4-g-n), and not before it (g4dn).
  arm64 = { for type in toset(concat(var.worker_instance_types, [var.control_instance_type, var.kafka_instance_type])) : type => can(regex("^[a-z]+[0-9]+g", type)) }
  ami   = { for type, arm64 in local.arm64 : type => try(data.aws_ssm_parameter.ami[arm64 ? "/arm64" : ""].insecure_value, null) }

  image             = join(startswith(var.image_tag, "sha256:") ? "@" : ":", [module.storage.repository_url, var.image_tag])
  kafka_client_port = { self_managed = 9092, msk = 9096, msk_serverless = 9098 }[var.kafka_mode]

  # External producers: SCRAM with a separate user, or IAM.
  producer_port = { self_managed = 9092, msk = 9098, msk_serverless = 9098 }[var.kafka_mode]
  producer_user = "doll-producer"

  # Workers run the task's code: not Kafka's super user, and not the user of the control host.
  worker_user = "doll-worker"

  # Fixed addresses from the reserved ranges, so that no worker gets one while its owner is being replaced. Node i of
  # Kafka is in subnet i modulo their number.
  control_ip = cidrhost(module.network.reserved_cidrs[0], 2)
  kafka_ips  = [for i in range(3) : cidrhost(module.network.reserved_cidrs[i % var.zone_count], 3 + i)]
}

module "storage" {
  source = "./modules/storage"

  name               = var.name
  force_destroy      = var.force_destroy
  log_retention_days = var.log_retention_days
  authorities        = var.schema_registry_ca == null ? {} : { registry = var.schema_registry_ca }
}

module "secrets" {
  source = "./modules/secrets"

  providers = {
    aws           = aws
    aws.passwords = aws.passwords
  }

  name                  = var.name
  kms_key_arn           = module.storage.kms_key_arn
  kafka_mode            = var.kafka_mode
  worker_user           = local.worker_user
  producer_user         = local.producer_user
  cache_mode            = var.cache_mode
  schema_registry_login = var.schema_registry_login
  cache_password        = module.cache.password
}

module "network" {
  source = "./modules/network"

  name                  = var.name
  vpc_cidr              = var.vpc_cidr
  zones                 = local.zones
  nat_mode              = var.nat_mode
  kafka_client_port     = local.kafka_client_port
  producer_port         = local.producer_port
  producer_cidrs        = var.producer_cidrs
  schema_registry_cidrs = var.schema_registry_cidrs
  schema_registry_port  = var.schema_registry_port
  flow_log_group_arn    = module.storage.flow_log_group_arn
  flow_log_role_arn     = module.storage.flow_log_role_arn
  endpoint_services = [
    "ec2", "ecr.api", "ecr.dkr", "kms", "logs", "monitoring", "secretsmanager", "sqs", "ssm", "ssmmessages",
  ]
}

module "kafka" {
  source = "./modules/kafka"

  name              = var.name
  region            = var.region
  mode              = var.kafka_mode
  broker_count      = var.kafka_broker_count
  volume_gb         = var.kafka_volume_gb
  subnet_ids        = module.network.private_subnet_ids
  zones             = local.zones
  private_ips       = local.kafka_ips
  security_group_id = module.network.security_group_ids.kafka
  kms_key_arn       = module.storage.kms_key_arn
  log_group         = module.storage.roles_log_group.name
  instance_type     = var.kafka_instance_type
  ami_id            = local.ami[var.kafka_instance_type]
  policy_json       = data.aws_iam_policy_document.kafka.json
  network_ready     = module.network.ready
  msk_instance_type = var.msk_instance_type
  msk_kafka_version = var.msk_kafka_version
  msk_secret_arns   = module.secrets.msk_arns
}

module "cache" {
  source = "./modules/cache"

  name              = var.name
  mode              = var.cache_mode
  subnet_ids        = module.network.private_subnet_ids
  security_group_id = module.network.security_group_ids.cache
  kms_key_arn       = module.storage.kms_key_arn
  node_type         = var.elasticache_node_type
  control_address   = local.control_ip
}

module "worker_boot" {
  source = "./modules/boot"

  environment = {
    AWS_REGION            = var.region
    DOLL_STACK_NAME       = var.name
    DOLL_BUCKET           = module.storage.bucket
    DOLL_ORPHAN_TIMEOUT_S = var.worker_orphan_minutes * 60
  }
  scripts = ["worker", "orphan"]
  units   = ["doll-worker.service", "doll-orphan.service"]
  start   = ["doll-orphan.service", "doll-worker.service"]
}

module "workers" {
  source = "./modules/workers"

  name              = var.name
  ami_id            = coalesce(var.worker_ami_id, local.ami[var.worker_instance_types[0]])
  volume_gb         = var.worker_volume_gb
  security_group_id = module.network.security_group_ids.worker
  user_data         = module.worker_boot.document
  policy_json       = data.aws_iam_policy_document.worker.json
}

module "function" {
  source = "./modules/function"
  count  = var.function_image_tag == null ? 0 : 1

  name               = var.name
  image              = "${module.storage.repository_url}${startswith(coalesce(var.function_image_tag, "-"), "sha256:") ? "@" : ":"}${coalesce(var.function_image_tag, "-")}"
  repository_name    = module.storage.repository_name
  is_arm64           = local.arm64[var.worker_instance_types[0]]
  memory_mb          = var.function_memory_mb
  timeout_s          = var.function_timeout_s
  ephemeral_mb       = var.function_ephemeral_mb
  concurrency        = var.function_concurrency
  subnet_ids         = module.network.private_subnet_ids
  security_group_id  = module.network.security_group_ids.worker
  kms_key_arn        = module.storage.kms_key_arn
  log_retention_days = var.log_retention_days
  policy_json        = data.aws_iam_policy_document.function.json

  # What doll.run.function_boot fetches when an environment starts: hosts have scripts for this, a function has none.
  environment = merge(
    {
      DOLL_KAFKA                 = module.kafka.bootstrap
      DOLL_REDIS                 = module.cache.url
      DOLL_BOOT_BUCKET           = module.storage.bucket
      DOLL_BOOT_CERT_AUTHORITIES = join(" ", local.authorities)
      DOLL_BOOT_SECRETS = join(" ", concat(
        [module.secrets.worker_name, "doll/${var.name}/cache"],
        var.schema_registry_login ? [module.secrets.schema_registry_name] : [],
      ))
    },
    { for name, variable in local.authority_variables : variable => "/tmp/doll-${name}.pem" if contains(local.authorities, name) },
  )
}

module "control" {
  source = "./modules/control"

  name          = var.name
  region        = var.region
  ami_id        = local.ami[var.control_instance_type]
  instance_type = var.control_instance_type
  volume_gb     = var.control_volume_gb
  subnet_id     = module.network.private_subnet_ids[0]
  private_ip    = local.control_ip
  security_group_ids = concat(
    [module.network.security_group_ids.control],
    var.cache_mode == "self_managed" ? [module.network.security_group_ids.cache] : [],
  )
  policy_json   = data.aws_iam_policy_document.control.json
  environment   = local.environment
  settings      = local.settings
  shards        = var.shards
  network_ready = module.network.ready
}

locals {
  # Services whose certificates are signed by the stack's own authorities, or by one that the caller names.
  authorities = concat(
    var.kafka_mode == "self_managed" ? ["kafka"] : [],
    var.cache_mode == "self_managed" ? ["cache"] : [],
    var.schema_registry_ca != null ? ["registry"] : [],
  )

  authority_variables = { kafka = "DOLL_KAFKA_CA", cache = "DOLL_REDIS_CA", registry = "DOLL_REGISTRY_CA" }

  environment = merge(
    {
      DOLL_KAFKA                      = module.kafka.bootstrap
      DOLL_REDIS                      = module.cache.url
      DOLL_BOOT_CERT_AUTHORITIES      = join(" ", local.authorities)
      DOLL_BOOT_BUCKET                = module.storage.bucket
      DOLL_BOOT_IMAGE                 = local.image
      DOLL_BOOT_KAFKA_IMAGE           = var.kafka_mode == "self_managed" ? var.kafka_image : ""
      DOLL_BOOT_CACHE_IMAGE           = var.cache_mode == "self_managed" ? var.cache_image : ""
      DOLL_BOOT_CACHE_MB              = tostring(var.cache_memory_mb)
      DOLL_BOOT_LOG_GROUP             = module.storage.roles_log_group.name
      DOLL_BOOT_SCHEMA_REGISTRY_LOGIN = var.schema_registry_login ? "yes" : ""
    },
    { for name, variable in local.authority_variables : variable => "/run/doll/ca/${name}.pem" if contains(local.authorities, name) },
  )

  settings = merge(local.fleet, {
    "kafka.security"           = "sasl_ssl"
    "kafka.worker_user"        = var.kafka_mode == "msk_serverless" ? "" : local.worker_user
    "kafka.producer_user"      = var.kafka_mode == "self_managed" ? local.producer_user : ""
    "kafka.replication_factor" = tostring(min(3, var.kafka_mode == "msk_serverless" ? 3 : var.kafka_broker_count))
    "ps.shards"                = tostring(var.shards)
    "fleet.cluster"            = var.name
    "fleet.region"             = var.region
  })

  fleet = var.function_image_tag == null ? tomap({
    "fleet.kind"                    = "ec2"
    "fleet.launch_template"         = module.workers.launch_template_id
    "fleet.launch_template_version" = tostring(module.workers.launch_template_version)
    "fleet.subnets"                 = jsonencode(module.network.private_subnet_ids)
    "fleet.instance_types"          = jsonencode(var.worker_instance_types)
    "fleet.queue_url"               = module.observability.queue_url
    }) : tomap({
    "fleet.kind"         = "lambda"
    "fleet.function"     = module.function[0].name
    "fleet.memory_mb"    = tostring(var.function_memory_mb)
    "fleet.timeout_s"    = tostring(var.function_timeout_s)
    "fleet.ephemeral_mb" = tostring(var.function_ephemeral_mb)
  })
}

module "observability" {
  source = "./modules/observability"

  name                 = var.name
  region               = var.region
  kms_key_arn          = module.storage.kms_key_arn
  control_instance_id  = module.control.instance_id
  roles_log_group      = module.storage.roles_log_group.name
  alarm_email          = var.alarm_email
  alarm_topic_arn      = var.alarm_topic_arn
  budget_usd_per_month = var.budget_usd_per_month
}

resource "aws_iam_service_linked_role" "spot" {
  count = var.create_spot_service_linked_role ? 1 : 0

  aws_service_name = "spot.amazonaws.com"
}

check "alarms_have_a_receiver" {
  assert {
    condition     = var.alarm_email != null || var.alarm_topic_arn != null
    error_message = "Nobody hears the alarms, neither of a stopped provisioner, which ends the budget's enforcement, nor of the monthly budget: set alarm_email, or alarm_topic_arn to an SNS topic of yours (README.md, alarms)."
  }
}

check "alarm_email_is_confirmed" {
  assert {
    condition     = coalesce(module.observability.alarm_email_is_confirmed, true)
    error_message = "Nobody hears the alarms yet: confirm the subscription in the e-mail that AWS has sent to alarm_email."
  }
}

# doll authenticates with SCRAM-SHA-512, which MSK Serverless does not support.
check "serverless_needs_iam_login" {
  assert {
    condition     = var.kafka_mode != "msk_serverless"
    error_message = "MSK Serverless supports IAM only, and doll's clients use SCRAM-SHA-512: the cluster and the permissions are created, but doll cannot connect yet (README.md, Kafka)."
  }
}
