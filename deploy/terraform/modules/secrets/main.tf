# Passwords are generated here and written to Secrets Manager (write-only arguments); they are in no state or plan. Hosts
# read them at boot. A secret changes only when its version does, that is when the modes change.

locals {
  version = 1 + index(["self_managed", "msk", "msk_serverless"], var.kafka_mode) + 10 * index(["self_managed", "elasticache"], var.cache_mode)

  msk_users = var.kafka_mode == "msk" ? ["clients", "worker"] : []

  empty = merge(
    var.kafka_mode == "self_managed" ? { kafka = "Key and certificate of Kafka's certificate authority" } : {},
    var.cache_mode == "self_managed" ? { cache = "Key and certificate of the cache's certificate authority" } : {},
  )
}

ephemeral "aws_secretsmanager_random_password" "kafka" {
  provider = aws.passwords

  password_length     = 32
  exclude_punctuation = true
}

ephemeral "aws_secretsmanager_random_password" "worker" {
  provider = aws.passwords

  password_length     = 32
  exclude_punctuation = true
}

ephemeral "aws_secretsmanager_random_password" "producer" {
  provider = aws.passwords

  password_length     = 32
  exclude_punctuation = true
}

ephemeral "aws_secretsmanager_random_password" "cache" {
  provider = aws.passwords

  password_length     = 32
  exclude_punctuation = true
}

# Of the control host: with self_managed Kafka's super user.
resource "aws_secretsmanager_secret" "clients" {
  # checkov:skip=CKV2_AWS_57: brokers read the password when they are created; docs/security.md describes the rotation
  name                    = "doll/${var.name}/clients"
  description             = "Kafka's user of the control host's roles, as a docker env file"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

resource "aws_secretsmanager_secret_version" "clients" {
  secret_id                = aws_secretsmanager_secret.clients.id
  secret_string_wo_version = local.version
  secret_string_wo         = <<-ENV
    DOLL_KAFKA_USERNAME=doll
    DOLL_KAFKA_PASSWORD=${ephemeral.aws_secretsmanager_random_password.kafka.random_password}
  ENV
}

# Of the control host and of the workers.
resource "aws_secretsmanager_secret" "cache" {
  # checkov:skip=CKV2_AWS_57: the cache reads the password when it starts, its clients when they do; docs/security.md describes the rotation
  name                    = "doll/${var.name}/cache"
  description             = "User name and password of the cache, as a docker env file"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

resource "aws_secretsmanager_secret_version" "cache" {
  secret_id                = aws_secretsmanager_secret.cache.id
  secret_string_wo_version = local.version
  secret_string_wo         = <<-ENV
    DOLL_REDIS_USERNAME=doll
    DOLL_REDIS_PASSWORD=${var.cache_password != null ? var.cache_password : ephemeral.aws_secretsmanager_random_password.cache.random_password}
  ENV
}

# Of the workers, which run the task's code: a Kafka user who can use what a worker needs of its job's topics.
resource "aws_secretsmanager_secret" "worker" {
  # checkov:skip=CKV2_AWS_57: brokers read the password when they are created; docs/security.md describes the rotation
  name                    = "doll/${var.name}/worker"
  description             = "Kafka's user of the workers, as a docker env file"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

resource "aws_secretsmanager_secret_version" "worker" {
  secret_id                = aws_secretsmanager_secret.worker.id
  secret_string_wo_version = local.version
  secret_string_wo         = <<-ENV
    DOLL_KAFKA_USERNAME=${var.worker_user}
    DOLL_KAFKA_PASSWORD=${ephemeral.aws_secretsmanager_random_password.worker.random_password}
  ENV
}

# For producers' machines: a user who can write samples only, without access to the cache. With MSK they use their IAM roles
# instead.
resource "aws_secretsmanager_secret" "producer" {
  # checkov:skip=CKV2_AWS_57: brokers read the password when they are created; docs/security.md describes the rotation
  count = var.kafka_mode == "self_managed" ? 1 : 0

  name                    = "doll/${var.name}/producer"
  description             = "User name and password of external producers, as a docker env file"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

resource "aws_secretsmanager_secret_version" "producer" {
  count = var.kafka_mode == "self_managed" ? 1 : 0

  secret_id                = aws_secretsmanager_secret.producer[0].id
  secret_string_wo_version = local.version
  secret_string_wo         = <<-ENV
    DOLL_KAFKA_USERNAME=${var.producer_user}
    DOLL_KAFKA_PASSWORD=${ephemeral.aws_secretsmanager_random_password.producer.random_password}
  ENV
}

# The users of the control host and of the workers, in the format and with the names that MSK requires.
resource "aws_secretsmanager_secret" "msk" {
  # checkov:skip=CKV2_AWS_57: hosts read the password when their services start; docs/security.md describes the rotation
  for_each = toset(local.msk_users)

  name                    = join("_", compact(["AmazonMSK_doll", var.name, each.key == "clients" ? "" : each.key]))
  description             = "User of the MSK cluster"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

resource "aws_secretsmanager_secret_version" "msk" {
  for_each = toset(local.msk_users)

  secret_id                = aws_secretsmanager_secret.msk[each.key].id
  secret_string_wo_version = local.version
  secret_string_wo = jsonencode({
    username = each.key == "worker" ? var.worker_user : "doll"
    password = each.key == "worker" ? ephemeral.aws_secretsmanager_random_password.worker.random_password : ephemeral.aws_secretsmanager_random_password.kafka.random_password
  })
}

moved {
  from = aws_secretsmanager_secret.msk[0]
  to   = aws_secretsmanager_secret.msk["clients"]
}

moved {
  from = aws_secretsmanager_secret_version.msk[0]
  to   = aws_secretsmanager_secret_version.msk["clients"]
}

# Written at boot by the host that owns the authority; Terraform never has a key.
resource "aws_secretsmanager_secret" "authority" {
  # checkov:skip=CKV2_AWS_57: an authority is not rotated automatically: its clients need the new certificate first
  for_each = local.empty

  name                    = "doll/${var.name}/${each.key}-authority"
  description             = each.value
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}

# Written by the operator: the registry is somebody else's. Terraform never has its value.
resource "aws_secretsmanager_secret" "schema_registry" {
  # checkov:skip=CKV2_AWS_57: the registry's owner decides when its log-in changes
  count = var.schema_registry_login ? 1 : 0

  name                    = "doll/${var.name}/schema-registry"
  description             = "Log-in at the schema registry, as a docker env file: DOLL_REGISTRY_USERNAME and DOLL_REGISTRY_PASSWORD, or DOLL_REGISTRY_TOKEN"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = 0
}
