# --- self_managed: KRaft on EC2, one to three nodes ---

locals {
  # Node 1, 2, 3 in zone 1, 2, 3: numbers are Kafka's node ids.
  nodes = var.mode == "self_managed" ? { for i in range(var.broker_count) : tostring(i + 1) => {
    zone       = var.zones[i % length(var.zones)]
    subnet_id  = var.subnet_ids[i % length(var.subnet_ids)]
    private_ip = var.private_ips[i]
  } } : {}

  voters    = join(",", [for node, at in local.nodes : "${node}@${at.private_ip}:9093"])
  bootstrap = join(",", [for at in local.nodes : "${at.private_ip}:9092"])
}

module "role" {
  source = "../role"
  count  = length(local.nodes) > 0 ? 1 : 0

  name        = var.name
  host        = "kafka"
  policy_json = var.policy_json
}

# The log persists when its machine is replaced.
resource "aws_ebs_volume" "data" {
  # checkov:skip=CKV_AWS_189: encrypted with the account's key for volumes; a separate key would add a way to lose the log
  # checkov:skip=CKV2_AWS_2: it is encrypted
  # checkov:skip=CKV2_AWS_9: three copies of each record, in three zones; a backup of a stream that is kept for hours is not useful
  for_each = local.nodes

  availability_zone = each.value.zone
  size              = var.volume_gb
  type              = "gp3"
  encrypted         = true

  tags = { Name = "${var.name}-kafka-${each.key}" }
}

module "boot" {
  source   = "../boot"
  for_each = local.nodes

  environment = {
    AWS_REGION      = var.region
    DOLL_STACK_NAME = var.name
    DOLL_NODE       = each.key
    DOLL_NODES      = var.broker_count
    DOLL_PRIVATE_IP = each.value.private_ip
    DOLL_VOLUME_ID  = aws_ebs_volume.data[each.key].id
    DOLL_VOTERS     = local.voters
  }
  scripts = ["broker"]
  units   = ["doll-broker.service"]
  start   = ["doll-broker.service"]
}

resource "aws_instance" "node" {
  # checkov:skip=CKV_AWS_126: the alarms use status checks, which are sent every minute anyway
  for_each = local.nodes

  ami                    = var.ami_id
  instance_type          = var.instance_type
  subnet_id              = each.value.subnet_id
  private_ip             = each.value.private_ip
  vpc_security_group_ids = [var.security_group_id]
  iam_instance_profile   = module.role[0].profile_name
  user_data_base64       = base64gzip(module.boot[each.key].document)
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
    volume_size = 30
    encrypted   = true
  }

  tags = { Name = "${var.name}-kafka-${each.key}" }

  lifecycle {
    # A new machine image of Amazon must not replace a broker; user data is read at the first boot only.
    ignore_changes = [ami, user_data_base64]
  }

  depends_on = [var.network_ready]
}

resource "aws_volume_attachment" "data" {
  for_each = local.nodes

  device_name = "/dev/sdf"
  volume_id   = aws_ebs_volume.data[each.key].id
  instance_id = aws_instance.node[each.key].id

  # A broker that is stopped first shuts its log down cleanly.
  stop_instance_before_detaching = true
}

# --- msk: provisioned ---

resource "aws_msk_configuration" "this" {
  count = var.mode == "msk" ? 1 : 0

  name           = "doll-${var.name}"
  kafka_versions = [var.msk_kafka_version]

  server_properties = <<-PROPERTIES
    auto.create.topics.enable=false
    default.replication.factor=${min(3, var.broker_count)}
    min.insync.replicas=${max(1, min(3, var.broker_count) - 1)}
    message.max.bytes=33554432
    replica.fetch.max.bytes=33554432
  PROPERTIES

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_msk_cluster" "this" {
  count = var.mode == "msk" ? 1 : 0

  cluster_name           = "doll-${var.name}"
  kafka_version          = var.msk_kafka_version
  number_of_broker_nodes = var.broker_count

  broker_node_group_info {
    instance_type   = var.msk_instance_type
    client_subnets  = var.subnet_ids
    security_groups = [var.security_group_id]

    storage_info {
      ebs_storage_info {
        volume_size = var.volume_gb
      }
    }
  }

  configuration_info {
    arn      = aws_msk_configuration.this[0].arn
    revision = aws_msk_configuration.this[0].latest_revision
  }

  client_authentication {
    sasl {
      scram = true
      iam   = true # external producers, by the policy `producer` of iam.tf
    }
  }

  encryption_info {
    encryption_at_rest_kms_key_arn = var.kms_key_arn

    encryption_in_transit {
      client_broker = "TLS"
      in_cluster    = true
    }
  }

  logging_info {
    broker_logs {
      cloudwatch_logs {
        enabled   = true
        log_group = var.log_group
      }
    }
  }
}

resource "aws_msk_scram_secret_association" "this" {
  count = var.mode == "msk" ? 1 : 0

  cluster_arn     = aws_msk_cluster.this[0].arn
  secret_arn_list = var.msk_secret_arns
}

# --- msk_serverless ---

resource "aws_msk_serverless_cluster" "this" {
  count = var.mode == "msk_serverless" ? 1 : 0

  cluster_name = "doll-${var.name}"

  vpc_config {
    subnet_ids         = var.subnet_ids
    security_group_ids = [var.security_group_id]
  }

  client_authentication {
    sasl {
      iam {
        enabled = true
      }
    }
  }
}
