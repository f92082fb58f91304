# Role and instance profile of a host: its policy, and access by Session Manager.

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "this" {
  name               = "${var.name}-${var.host}"
  assume_role_policy = data.aws_iam_policy_document.trust.json
}

resource "aws_iam_role_policy" "this" {
  name   = var.host
  role   = aws_iam_role.this.id
  policy = var.policy_json
}

# Not AWS's AmazonSSMManagedInstanceCore, which can read every parameter of the account: hosts run users' code.
# Shells and commands (Run Command of agents from 3.3.40 on) both use ssmmessages.
data "aws_iam_policy_document" "session_manager" {
  # checkov:skip=CKV_AWS_356: these actions do not support resources
  # checkov:skip=CKV_AWS_111: these actions do not support resources; they reach the host's own sessions only
  statement {
    sid = "SessionManager"
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
    resources = ["*"]
  }
}

resource "aws_iam_role_policy" "session_manager" {
  name   = "session-manager"
  role   = aws_iam_role.this.id
  policy = data.aws_iam_policy_document.session_manager.json
}

resource "aws_iam_instance_profile" "this" {
  name = "${var.name}-${var.host}"
  role = aws_iam_role.this.name
}
