# A function whose invocations are workers (fleet.kind: lambda). The provisioner invokes it; docs/guide/functions.md.

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

data "aws_region" "this" {}

locals {
  function_name = "doll-${var.name}-worker"
  # By name: the role and the policy of the images are needed before the function.
  arn = "arn:${data.aws_partition.this.partition}:lambda:${data.aws_region.this.name}:${data.aws_caller_identity.this.account_id}:function:${local.function_name}"
}

resource "aws_cloudwatch_log_group" "this" {
  # checkov:skip=CKV_AWS_338: the retention is the user's choice (log_retention_days)
  name              = "/doll/${var.name}/function"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
}

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["lambda.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

data "aws_iam_policy_document" "this" {
  # checkov:skip=CKV_AWS_356: the actions on network interfaces do not support resources before one exists
  # checkov:skip=CKV_AWS_111: the code of the function itself is denied what Lambda needs to attach it to the VPC
  statement {
    sid       = "Logs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.this.arn}:*"]
  }

  # Lambda uses them with this role, so that the function is in the VPC.
  statement {
    sid       = "Network"
    actions   = local.network_actions
    resources = ["*"]
  }

  statement {
    sid       = "NotByTheCode"
    effect    = "Deny"
    actions   = local.network_actions
    resources = ["*"]

    condition {
      test     = "ArnEquals"
      variable = "lambda:SourceFunctionArn"
      values   = [local.arn]
    }
  }

  source_policy_documents = [var.policy_json]
}

locals {
  network_actions = [
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses",
    "ec2:UnassignPrivateIpAddresses",
  ]
}

resource "aws_iam_role" "this" {
  name               = "${var.name}-function"
  assume_role_policy = data.aws_iam_policy_document.trust.json
}

resource "aws_iam_role_policy" "this" {
  name   = "function"
  role   = aws_iam_role.this.id
  policy = data.aws_iam_policy_document.this.json
}

# Lambda itself gets the image.
data "aws_iam_policy_document" "images" {
  statement {
    sid     = "Lambda"
    actions = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]

    principals {
      type        = "Service"
      identifiers = ["lambda.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceArn"
      values   = [local.arn]
    }
  }
}

resource "aws_ecr_repository_policy" "this" {
  repository = var.repository_name
  policy     = data.aws_iam_policy_document.images.json
}

resource "aws_lambda_function" "this" {
  # checkov:skip=CKV_AWS_116: the provisioner replaces a worker that is lost; an event that nobody has worked on has no use later
  # checkov:skip=CKV_AWS_50: `doll otel` traces batches; an invocation is one span of a quarter of an hour
  # checkov:skip=CKV_AWS_272: code signing is for ZIP archives, and this is an image
  function_name = local.function_name
  description   = "A worker of ${var.name}; only doll provision invokes it"
  package_type  = "Image"
  image_uri     = var.image
  architectures = [var.is_arm64 ? "arm64" : "x86_64"]
  role          = aws_iam_role.this.arn
  memory_size   = var.memory_mb
  timeout       = var.timeout_s
  kms_key_arn   = var.kms_key_arn

  # A successor starts beside its predecessor. Also the limit of what a mistake can cost.
  reserved_concurrent_executions = var.concurrency

  image_config {
    entry_point       = ["python", "-m", "awslambdaric"]
    command           = ["doll.run.function.handle"]
    working_directory = "/var/task"
  }

  ephemeral_storage {
    size = var.ephemeral_mb
  }

  vpc_config {
    subnet_ids         = var.subnet_ids
    security_group_ids = [var.security_group_id]
  }

  environment {
    variables = var.environment
  }

  logging_config {
    log_format = "Text"
    log_group  = aws_cloudwatch_log_group.this.name
  }

  depends_on = [aws_iam_role_policy.this, aws_ecr_repository_policy.this]
}

# DOLL replaces a lost worker itself, and gives an event up after three minutes (fleet.start_timeout_s).
resource "aws_lambda_function_event_invoke_config" "this" {
  function_name                = aws_lambda_function.this.function_name
  maximum_retry_attempts       = 0
  maximum_event_age_in_seconds = 180
}
