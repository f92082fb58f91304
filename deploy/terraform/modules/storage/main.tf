data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

data "aws_region" "this" {}

locals {
  account_root = "arn:${data.aws_partition.this.partition}:iam::${data.aws_caller_identity.this.account_id}:root"
  log_groups   = "arn:${data.aws_partition.this.partition}:logs:${data.aws_region.this.name}:${data.aws_caller_identity.this.account_id}:log-group:/doll/${var.name}/*"
}

# --- one key for bucket, logs, secrets, images and alarms ---

data "aws_iam_policy_document" "key" {
  # checkov:skip=CKV_AWS_109: a key policy must allow the account's administrators to manage the key
  # checkov:skip=CKV_AWS_111: a key policy must allow the account's administrators to manage the key
  # checkov:skip=CKV_AWS_356: in a key policy, * means this key
  statement {
    sid       = "Account"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = [local.account_root]
    }
  }

  statement {
    sid       = "Logs"
    actions   = ["kms:Encrypt*", "kms:Decrypt*", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:Describe*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["logs.${data.aws_region.this.name}.amazonaws.com"]
    }

    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = [local.log_groups]
    }
  }

  statement {
    sid       = "Alarms"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

resource "aws_kms_key" "this" {
  description             = "DOLL ${var.name}: bucket, logs, secrets, images, alarms"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.key.json
}

resource "aws_kms_alias" "this" {
  name          = "alias/doll-${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

# --- bucket: checkpoints, the job, certificates of the authorities ---

resource "aws_s3_bucket" "this" {
  # checkov:skip=CKV_AWS_18: a job's own bucket, closed to others; CloudTrail data events can log access if needed
  # checkov:skip=CKV_AWS_21: a checkpoint every 2 s, each an object of its own: a week of versions is 300,000 of them (at 75 MB, 520 USD a month). The store never overwrites one, and keeps the newest
  # checkov:skip=CKV_AWS_144: a checkpoint that is lost with its region means a run to repeat, not lost data: the stream is in Kafka
  # checkov:skip=CKV2_AWS_62: nothing consumes events of these objects
  bucket_prefix = "doll-${var.name}-"
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  # The bucket has no versions. Those of a stack that was created when it had are deleted.
  rule {
    id     = "old-versions"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = 1
    }

    expiration {
      expired_object_delete_marker = true
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = data.aws_iam_policy_document.bucket.json

  depends_on = [aws_s3_bucket_public_access_block.this]
}

# Hosts fetch it at boot, like those of the stack's own authorities, which their hosts write.
resource "aws_s3_object" "authority" {
  for_each = var.authorities

  bucket     = aws_s3_bucket.this.id
  key        = "ca/${each.key}.pem"
  content    = each.value
  kms_key_id = aws_kms_key.this.arn
}

# --- images ---

resource "aws_ecr_repository" "this" {
  name                 = "doll-${var.name}"
  image_tag_mutability = "IMMUTABLE"
  force_delete         = var.force_destroy

  image_scanning_configuration {
    scan_on_push = true
  }

  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = aws_kms_key.this.arn
  }
}

resource "aws_ecr_lifecycle_policy" "this" {
  repository = aws_ecr_repository.this.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "keep 20"
      selection    = { tagStatus = "any", countType = "imageCountMoreThan", countNumber = 20 }
      action       = { type = "expire" }
    }]
  })
}

# --- logs ---

resource "aws_cloudwatch_log_group" "this" {
  # checkov:skip=CKV_AWS_338: the retention is the user's choice (log_retention_days)
  for_each = toset(["roles", "flows"])

  name              = "/doll/${var.name}/${each.key}"
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.this.arn
}

data "aws_iam_policy_document" "flows_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

data "aws_iam_policy_document" "flows" {
  statement {
    sid       = "WriteFlowLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${aws_cloudwatch_log_group.this["flows"].arn}:*"]
  }
}

resource "aws_iam_role" "flows" {
  name               = "${var.name}-flow-logs"
  assume_role_policy = data.aws_iam_policy_document.flows_trust.json
}

resource "aws_iam_role_policy" "flows" {
  name   = "write"
  role   = aws_iam_role.flows.id
  policy = data.aws_iam_policy_document.flows.json
}

