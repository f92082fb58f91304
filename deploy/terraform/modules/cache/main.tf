# self_managed runs on the control host (modules/control): the parameter server is a single host anyway, and everything in
# the cache can be computed again.

locals {
  elasticache = var.mode == "elasticache" ? 1 : 0
}

# ElastiCache has no write-only password: in this mode only, the state contains one. It does not change after its creation.
data "aws_secretsmanager_random_password" "this" {
  count = local.elasticache

  password_length     = 32
  exclude_punctuation = true
}

resource "terraform_data" "password" {
  count = local.elasticache

  input = data.aws_secretsmanager_random_password.this[0].random_password

  lifecycle {
    ignore_changes = [input]
  }
}

resource "aws_elasticache_subnet_group" "this" {
  count = local.elasticache

  name       = "doll-${var.name}"
  subnet_ids = var.subnet_ids
}

resource "aws_elasticache_user" "doll" {
  count = local.elasticache

  user_id       = "doll-${var.name}"
  user_name     = "doll"
  engine        = "valkey"
  access_string = "on ~doll:* +@all -@dangerous"

  authentication_mode {
    type      = "password"
    passwords = [sensitive(terraform_data.password[0].output)]
  }
}

resource "aws_elasticache_user_group" "this" {
  count = local.elasticache

  user_group_id = "doll-${var.name}"
  engine        = "valkey"
  user_ids      = [aws_elasticache_user.doll[0].user_id]
}

resource "aws_elasticache_replication_group" "this" {
  # checkov:skip=CKV_AWS_31: clients are authenticated by the user group, which replaces the auth token
  count = local.elasticache

  replication_group_id       = "doll-${var.name}"
  description                = "Weights and gradients of DOLL ${var.name}"
  engine                     = "valkey"
  engine_version             = "8.0"
  node_type                  = var.node_type
  num_cache_clusters         = 2
  automatic_failover_enabled = true
  multi_az_enabled           = true
  at_rest_encryption_enabled = true
  kms_key_id                 = var.kms_key_arn
  transit_encryption_enabled = true
  transit_encryption_mode    = "required"
  user_group_ids             = [aws_elasticache_user_group.this[0].id]
  subnet_group_name          = aws_elasticache_subnet_group.this[0].name
  security_group_ids         = [var.security_group_id]
  parameter_group_name       = aws_elasticache_parameter_group.this[0].name
  apply_immediately          = true
  snapshot_retention_limit   = 0
}

# doll's keys expire by their time to live: none may be evicted.
resource "aws_elasticache_parameter_group" "this" {
  count = local.elasticache

  name   = "doll-${var.name}"
  family = "valkey8"

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}
