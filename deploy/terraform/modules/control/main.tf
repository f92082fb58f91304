# Parameter server with its shards, provisioner, evaluator and the self-managed cache on one on-demand machine. Persistent data is in the
# bucket (checkpoints) and in Kafka.

# Hosts read both parameters when their services start, so a change needs no new machine.
resource "aws_ssm_parameter" "environment" {
  # checkov:skip=CKV2_AWS_34: it contains no secret; secrets are in Secrets Manager
  # checkov:skip=CKV_AWS_337: without a secret there is nothing to encrypt with a key of the stack's own
  name        = "/doll/${var.name}/environment"
  description = "Environment of doll's containers, a docker env file"
  type        = "String"
  value       = join("", [for key in sort(keys(var.environment)) : "${key}=${var.environment[key]}\n"])
}

resource "aws_ssm_parameter" "settings" {
  # checkov:skip=CKV2_AWS_34: it contains no secret; secrets are in Secrets Manager
  # checkov:skip=CKV_AWS_337: without a secret there is nothing to encrypt with a key of the stack's own
  name        = "/doll/${var.name}/settings"
  description = "Job settings of the stack, one --set per line"
  type        = "String"
  value       = join("", [for key in sort(keys(var.settings)) : "${key}=${var.settings[key]}\n"])
}

module "role" {
  source = "../role"

  name        = var.name
  host        = "control"
  policy_json = var.policy_json
}

locals {
  roles = ["ps", "evaluate", "provision"]

  services = [for role in concat(local.roles, local.shards) : "doll-role@${role}"]

  shards = [for number in range(var.shards > 1 ? var.shards : 0) : "shard-${number}"]
}

module "boot" {
  source = "../boot"

  environment = {
    AWS_REGION      = var.region
    DOLL_STACK_NAME = var.name
    DOLL_PRIVATE_IP = var.private_ip
  }
  scripts = ["control", "cache", "role", "heartbeat", "doll", "drain"]
  units   = ["doll-boot.service", "doll-cache.service", "doll-role@.service", "doll-heartbeat.service", "doll-heartbeat.timer"]
  start = concat(
    ["doll-boot.service", "doll-cache.service"],
    [for unit in local.services : "${unit}.service"],
    ["doll-heartbeat.timer"],
  )
}

resource "aws_instance" "this" {
  # checkov:skip=CKV_AWS_126: the alarms use status checks, which are sent every minute anyway
  ami                    = var.ami_id
  instance_type          = var.instance_type
  subnet_id              = var.subnet_id
  private_ip             = var.private_ip
  vpc_security_group_ids = var.security_group_ids
  iam_instance_profile   = module.role.profile_name
  user_data_base64       = base64gzip(module.boot.document)
  ebs_optimized          = true

  # Terraform's provider lifts it where it destroys or replaces the machine itself.
  disable_api_termination = true

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = var.volume_gb
    encrypted   = true
  }

  tags = { Name = "${var.name}-control" }

  lifecycle {
    # A new machine image of Amazon must not replace the host of a running job; user data is read at the first boot only.
    ignore_changes = [ami, user_data_base64]
  }

  depends_on = [
    var.network_ready,
    module.role,
    aws_ssm_parameter.environment,
    aws_ssm_parameter.settings,
  ]
}
