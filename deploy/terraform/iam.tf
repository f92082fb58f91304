# Permissions of the three roles. The actions are those that the code calls; docs/aws.md lists what is deliberately absent.
# tests/deploy/test_terraform.py compares this list with the code.

locals {
  arn         = "arn:${data.aws_partition.this.partition}"
  ec2         = "${local.arn}:ec2:${var.region}:${data.aws_caller_identity.this.account_id}"
  cluster_tag = "doll:cluster"
}

data "aws_iam_policy_document" "control" {
  # checkov:skip=CKV_AWS_356: Describe actions, prices, quotas and PutMetricData do not support resources
  # checkov:skip=CKV_AWS_111: launches are restricted by the cluster's tag, the launch template and the subnets
  statement {
    sid = "Read"
    actions = [
      "ec2:DescribeInstances",
      "ec2:DescribeInstanceStatus",
      "ec2:DescribeInstanceTypes",
      "ec2:DescribeInstanceTypeOfferings",
      "ec2:DescribeLaunchTemplateVersions",
      "ec2:DescribeSpotPriceHistory",
      "ec2:DescribeSubnets",
      "ec2:GetSpotPlacementScores",
      "pricing:GetProducts",
      "servicequotas:GetServiceQuota",
    ]
    resources = ["*"]
  }

  # Existing resources that a launch uses; they do not carry the cluster's tag.
  statement {
    sid     = "LaunchFrom"
    actions = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = concat(
      [
        "${local.arn}:ec2:${var.region}::image/*",
        "${local.arn}:ec2:${var.region}::snapshot/*",
        "${local.ec2}:security-group/${module.network.security_group_ids.worker}",
        "${local.ec2}:spot-instances-request/*",
        module.workers.launch_template_arn,
      ],
      [for id in module.network.private_subnet_ids : "${local.ec2}:subnet/${id}"],
    )
  }

  # Resources that a launch creates: only with the cluster's tag on all four, and instances of the workers' types only.
  statement {
    sid     = "LaunchTagged"
    actions = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = [
      "${local.ec2}:fleet/*",
      "${local.ec2}:volume/*",
      "${local.ec2}:network-interface/*",
    ]

    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/${local.cluster_tag}"
      values   = [var.name]
    }
  }

  # A fleet asks for several types, and its instances are run one by one: IfExists, because only RunInstances always has a type.
  dynamic "statement" {
    for_each = { "ec2:RunInstances" = "StringEquals", "ec2:CreateFleet" = "StringEqualsIfExists" }

    content {
      sid       = "LaunchWorkerTypesBy${split(":", statement.key)[1]}"
      actions   = [statement.key]
      resources = ["${local.ec2}:instance/*"]

      condition {
        test     = "StringEquals"
        variable = "aws:RequestTag/${local.cluster_tag}"
        values   = [var.name]
      }

      condition {
        test     = statement.value
        variable = "ec2:InstanceType"
        values   = var.worker_instance_types
      }
    }
  }

  statement {
    sid     = "TagAtLaunch"
    actions = ["ec2:CreateTags"]
    resources = [
      "${local.ec2}:fleet/*",
      "${local.ec2}:instance/*",
      "${local.ec2}:volume/*",
      "${local.ec2}:network-interface/*",
    ]

    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["CreateFleet", "RunInstances"]
    }
  }

  # The stack's own machines carry doll:stack, not this tag: the provisioner cannot terminate its own host or a broker.
  statement {
    sid       = "TerminateOwn"
    actions   = ["ec2:TerminateInstances"]
    resources = ["${local.ec2}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/${local.cluster_tag}"
      values   = [var.name]
    }
  }

  statement {
    sid       = "PassWorkerRole"
    actions   = ["iam:PassRole"]
    resources = [module.workers.role_arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }

  dynamic "statement" {
    for_each = module.function[*].arn

    content {
      sid       = "InvokeWorkers"
      actions   = ["lambda:InvokeFunction", "lambda:GetFunction", "lambda:GetFunctionConcurrency"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.function_image_tag == null ? [] : ["*"]

    content {
      sid       = "AccountConcurrency"
      actions   = ["lambda:GetAccountSettings"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.function_image_tag == null ? [] : [module.storage.repository_arn]

    content {
      sid       = "ImageSize"
      actions   = ["ecr:DescribeImages"]
      resources = [statement.value]
    }
  }

  statement {
    sid       = "Queue"
    actions   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes"]
    resources = [module.observability.queue_arn]
  }

  # DeleteObject: the store keeps the newest checkpoints and deletes the others, and old claims.
  statement {
    sid       = "Checkpoints"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    resources = ["${module.storage.bucket_arn}/checkpoints/*"]
  }

  statement {
    sid       = "ListCheckpoints"
    actions   = ["s3:ListBucket"]
    resources = [module.storage.bucket_arn]
  }

  statement {
    sid       = "Metrics"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = ["DOLL"]
    }
  }

  # --- at boot ---

  statement {
    sid       = "Passwords"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [module.secrets.clients_arn, module.secrets.cache_arn]
  }

  statement {
    sid       = "Job"
    actions   = ["s3:GetObject"]
    resources = ["${module.storage.bucket_arn}/job/*", "${module.storage.bucket_arn}/ca/*"]
  }

  dynamic "statement" {
    for_each = var.schema_registry_login ? [module.secrets.schema_registry_arn] : []

    content {
      sid       = "SchemaRegistry"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = [statement.value]
    }
  }

  statement {
    sid       = "Heartbeat"
    actions   = ["s3:PutObject"]
    resources = ["${module.storage.bucket_arn}/job/heartbeat"]
  }

  dynamic "statement" {
    for_each = var.cache_mode == "self_managed" ? [module.secrets.authority_arns.cache] : []

    content {
      sid       = "CacheAuthority"
      actions   = ["secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.cache_mode == "self_managed" ? ["${module.storage.bucket_arn}/ca/cache.pem"] : []

    content {
      sid       = "PublishCacheAuthority"
      actions   = ["s3:PutObject"]
      resources = [statement.value]
    }
  }

  source_policy_documents = [data.aws_iam_policy_document.boot.json, data.aws_iam_policy_document.iam_client.json]
}

# No ec2:* actions: a worker reads its slot from its instance's tags in the metadata service. Of the passwords only its own:
# it runs the task's code, and those of the control host are Kafka's super user's.
data "aws_iam_policy_document" "worker" {
  statement {
    sid       = "Passwords"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [module.secrets.worker_arn, module.secrets.cache_arn]
  }

  statement {
    sid       = "Job"
    actions   = ["s3:GetObject"]
    resources = ["${module.storage.bucket_arn}/job/*", "${module.storage.bucket_arn}/ca/*"]
  }

  dynamic "statement" {
    for_each = var.schema_registry_login ? [module.secrets.schema_registry_arn] : []

    content {
      sid       = "SchemaRegistry"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = [statement.value]
    }
  }

  source_policy_documents = [data.aws_iam_policy_document.boot.json, data.aws_iam_policy_document.iam_client.json]
}

# A worker in a function: no host, so no registry, parameters or log of the hosts. modules/function adds its log and network.
data "aws_iam_policy_document" "function" {
  statement {
    sid       = "Passwords"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = concat([module.secrets.worker_arn, module.secrets.cache_arn], var.schema_registry_login ? [module.secrets.schema_registry_arn] : [])
  }

  statement {
    sid       = "Authorities"
    actions   = ["s3:GetObject"]
    resources = ["${module.storage.bucket_arn}/ca/*"]
  }

  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt"]
    resources = [module.storage.kms_key_arn]
  }

  source_policy_documents = [data.aws_iam_policy_document.iam_client.json]
}

data "aws_iam_policy_document" "kafka" {
  dynamic "statement" {
    for_each = var.kafka_mode == "self_managed" ? [module.secrets.authority_arns.kafka] : []

    content {
      sid       = "KafkaAuthority"
      actions   = ["secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.kafka_mode == "self_managed" ? [[module.secrets.clients_arn, module.secrets.worker_arn, module.secrets.producer_arn]] : []

    content {
      sid       = "Passwords"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = statement.value
    }
  }

  statement {
    sid       = "PublishKafkaAuthority"
    actions   = ["s3:PutObject"]
    resources = ["${module.storage.bucket_arn}/ca/kafka.pem"]
  }

  source_policy_documents = [data.aws_iam_policy_document.boot.json]
}

# Permissions of every host's boot: modules/boot/files/common.sh.
data "aws_iam_policy_document" "boot" {
  # checkov:skip=CKV_AWS_356: ecr:GetAuthorizationToken does not support resources
  statement {
    sid       = "Registry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"]
  }

  statement {
    sid       = "Image"
    actions   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
    resources = [module.storage.repository_arn]
  }

  statement {
    sid       = "Parameters"
    actions   = ["ssm:GetParameter"]
    resources = ["${local.arn}:ssm:${var.region}:${data.aws_caller_identity.this.account_id}:parameter/doll/${var.name}/*"]
  }

  statement {
    sid       = "Key"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [module.storage.kms_key_arn]
  }

  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${module.storage.roles_log_group.arn}:*"]
  }
}

# With msk and msk_serverless: for the roles of producers' machines. IAM's patterns, unlike Kafka's, can match the samples
# topics of all jobs and no other topic.
data "aws_iam_policy_document" "producer" {
  count = var.kafka_mode == "self_managed" ? 0 : 1

  statement {
    sid       = "Connect"
    actions   = ["kafka-cluster:Connect"]
    resources = [module.kafka.cluster_arn]
  }

  statement {
    sid       = "WriteSamples"
    actions   = ["kafka-cluster:DescribeTopic", "kafka-cluster:WriteData"]
    resources = ["${replace(module.kafka.cluster_arn, ":cluster/", ":topic/")}/doll.*.samples"]
  }

  statement {
    sid       = "Idempotence"
    actions   = ["kafka-cluster:WriteDataIdempotently"]
    resources = [module.kafka.cluster_arn]
  }
}

resource "aws_iam_policy" "producer" {
  count = var.kafka_mode == "self_managed" ? 0 : 1

  name        = "${var.name}-producer"
  description = "Write to the samples topics of doll's jobs only"
  policy      = data.aws_iam_policy_document.producer[0].json
}

# With msk_serverless, which identifies clients by their roles only.
data "aws_iam_policy_document" "iam_client" {
  dynamic "statement" {
    for_each = var.kafka_mode == "msk_serverless" ? {
      KafkaConnect = { actions = ["kafka-cluster:Connect"], kind = "cluster" }
      KafkaTopics = {
        actions = ["kafka-cluster:CreateTopic", "kafka-cluster:DescribeTopic", "kafka-cluster:ReadData", "kafka-cluster:WriteData", "kafka-cluster:WriteDataIdempotently"]
        kind    = "topic"
      }
      KafkaGroups = { actions = ["kafka-cluster:DescribeGroup", "kafka-cluster:AlterGroup"], kind = "group" }
    } : {}

    content {
      sid     = statement.key
      actions = statement.value.actions
      # cluster/name/uuid, topic/name/uuid/topic, group/name/uuid/group
      resources = [join("", [
        replace(module.kafka.cluster_arn, ":cluster/", ":${statement.value.kind}/"),
        statement.value.kind == "cluster" ? "" : "/doll.*",
      ])]
    }
  }
}
