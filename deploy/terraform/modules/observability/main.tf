# Interruption notices for the provisioner, and alarms.

# --- EventBridge -> SQS: the events carry no tags, so all spot instances of the account are in the queue ---

locals {
  events = {
    interruption = "EC2 Spot Instance Interruption Warning"
    rebalance    = "EC2 Instance Rebalance Recommendation"
    state        = "EC2 Instance State-change Notification"
  }
}

resource "aws_sqs_queue" "notices" {
  name = "doll-${var.name}-notices"
  # A notice is valid for two minutes; after that the provisioner sees the interruption in the list of instances.
  message_retention_seconds  = 300
  receive_wait_time_seconds  = 20
  visibility_timeout_seconds = 30
  sqs_managed_sse_enabled    = true
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.events

  name          = "doll-${var.name}-${each.key}"
  description   = each.value
  event_pattern = jsonencode({ source = ["aws.ec2"], "detail-type" = [each.value] })
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = local.events

  rule      = aws_cloudwatch_event_rule.this[each.key].name
  target_id = "notices"
  arn       = aws_sqs_queue.notices.arn
}

data "aws_iam_policy_document" "notices" {
  statement {
    sid       = "RulesMaySend"
    actions   = ["sqs:SendMessage"]
    resources = [aws_sqs_queue.notices.arn]

    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }

    condition {
      test     = "ArnEquals"
      variable = "aws:SourceArn"
      values   = [for rule in aws_cloudwatch_event_rule.this : rule.arn]
    }
  }
}

resource "aws_sqs_queue_policy" "notices" {
  queue_url = aws_sqs_queue.notices.id
  policy    = data.aws_iam_policy_document.notices.json
}

# --- alarms ---

locals {
  alarms = var.alarm_topic_arn == null ? aws_sns_topic.alarms[0].arn : var.alarm_topic_arn
}

resource "aws_sns_topic" "alarms" {
  count = var.alarm_topic_arn == null ? 1 : 0

  name              = "doll-${var.name}-alarms"
  kms_master_key_id = var.kms_key_arn
}

resource "aws_sns_topic_subscription" "email" {
  count = var.alarm_email == null ? 0 : 1

  topic_arn = local.alarms
  protocol  = "email"
  endpoint  = var.alarm_email
}

# The control host counts them every minute while the parameter server runs. Without a job there are no data and no alarm.
resource "aws_cloudwatch_metric_alarm" "no_workers" {
  alarm_name          = "doll-${var.name}-no-workers"
  alarm_description   = "The parameter server runs, and for 15 minutes there has been no worker: doll status, then the provisioner's decisions"
  namespace           = "DOLL"
  metric_name         = "WorkersRunning"
  dimensions          = { Cluster = var.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 3
  threshold           = 1
  comparison_operator = "LessThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.alarms]
  ok_actions          = [local.alarms]
}

# Every minute the control host reports for each role whether it is silent; 0 also if it has ended or was stopped manually.
# If the host reports nothing, the parameter server counts as silent.
resource "aws_cloudwatch_metric_alarm" "role_silent" {
  for_each = {
    ps          = "The parameter server, or one of its shards, is silent: nothing is learned. journalctl -u doll-role@ps -u 'doll-role@shard-*'"
    evaluator   = "The evaluator is silent: the job continues without held-out errors. journalctl -u doll-role@evaluate"
    provisioner = "The provisioner is silent: workers are not replaced, and the budget is not enforced. journalctl -u doll-role@provision; or terminate the workers: /opt/doll/drain.sh"
  }

  alarm_name          = "doll-${var.name}-${each.key}-silent"
  alarm_description   = each.value
  namespace           = "DOLL"
  metric_name         = "RoleSilent"
  dimensions          = { Cluster = var.name, Role = each.key }
  statistic           = "Minimum"
  period              = 60
  evaluation_periods  = each.key == "ps" ? 10 : 5
  threshold           = 1
  comparison_operator = "GreaterThanOrEqualToThreshold"
  treat_missing_data  = each.key == "ps" ? "breaching" : "notBreaching"
  alarm_actions       = [local.alarms]
  ok_actions          = [local.alarms]
}

resource "aws_cloudwatch_metric_alarm" "control_host" {
  alarm_name          = "doll-${var.name}-control-host"
  alarm_description   = "The control host fails its system check: EC2 moves it to other hardware; the job continues from the newest checkpoint"
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed_System"
  dimensions          = { InstanceId = var.control_instance_id }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 3
  threshold           = 1
  comparison_operator = "GreaterThanOrEqualToThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = ["arn:${data.aws_partition.this.partition}:automate:${var.region}:ec2:recover", local.alarms]
}

# Notices are read within seconds: an old one means that no provisioner reads them.
resource "aws_cloudwatch_metric_alarm" "notices_unread" {
  alarm_name          = "doll-${var.name}-notices-unread"
  alarm_description   = "Interruption notices have been unread for two minutes: check the provisioner (doll-role@provision)"
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.notices.name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 5
  threshold           = 120
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.alarms]
}

# Sent with the metrics of the provisioner's newest decision, every minute while parameter server and provisioner run.
resource "aws_cloudwatch_metric_alarm" "provisioner_alarms" {
  alarm_name          = "doll-${var.name}-provisioner-alarms"
  alarm_description   = "The provisioner has alarms: a source that is silent, machines that fail, no update, a quota, prices. docker exec doll-provision doll provision status --job /job/job.yaml --run-folder /var/lib/doll"
  namespace           = "DOLL"
  metric_name         = "doll_provisioner_alarms"
  dimensions          = { Cluster = var.name }
  statistic           = "Minimum"
  period              = 60
  evaluation_periods  = 3
  threshold           = 1
  comparison_operator = "GreaterThanOrEqualToThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [local.alarms]
  ok_actions          = [local.alarms]
}

data "aws_partition" "this" {}

# By tag: activate `doll:stack` and `doll:cluster` as cost allocation tags in the billing console first. The cost of the
# workers is under `doll:cluster`, the provisioner's own tag.
resource "aws_budgets_budget" "this" {
  count = var.budget_usd_per_month > 0 ? 1 : 0

  name         = "doll-${var.name}"
  budget_type  = "COST"
  limit_amount = tostring(var.budget_usd_per_month)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  # Budgets wants "user:KEY$VALUE". format() writes the dollar sign, because "$${" in a template is the text "${".
  cost_filter {
    name   = "TagKeyValue"
    values = [for key in ["doll:stack", "doll:cluster"] : format("user:%s$%s", key, var.name)]
  }

  # AWS needs about five weeks of history for a forecast: until then only what has been spent can alarm.
  dynamic "notification" {
    for_each = [
      { type = "ACTUAL", percent = 80 },
      { type = "ACTUAL", percent = 100 },
      { type = "FORECASTED", percent = 100 },
    ]

    content {
      comparison_operator       = "GREATER_THAN"
      notification_type         = notification.value.type
      threshold                 = notification.value.percent
      threshold_type            = "PERCENTAGE"
      subscriber_sns_topic_arns = [local.alarms]
    }
  }
}

data "aws_iam_policy_document" "alarms" {
  count = var.alarm_topic_arn == null ? 1 : 0

  statement {
    sid       = "AlarmsMayPublish"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms[0].arn]

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

data "aws_caller_identity" "this" {}

resource "aws_sns_topic_policy" "alarms" {
  count = var.alarm_topic_arn == null ? 1 : 0

  arn    = local.alarms
  policy = data.aws_iam_policy_document.alarms[0].json
}

# --- dashboard ---

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = "doll-${var.name}"
  dashboard_body = jsonencode({
    widgets = [
      {
        type = "metric", x = 0, y = 0, width = 12, height = 6
        properties = {
          title = "Workers", region = var.region, stat = "Maximum", period = 60, view = "timeSeries"
          metrics = [
            ["DOLL", "WorkersRunning", "Cluster", var.name, { label = "running, spot and on-demand" }],
            ["DOLL", "doll_provisioner_instances_spot", "Cluster", var.name, { label = "on spot, also booting (N_s)" }],
          ]
        }
      },
      {
        type = "metric", x = 12, y = 0, width = 12, height = 6
        properties = {
          title = "Control host", region = var.region, stat = "Average", period = 60, view = "timeSeries"
          metrics = [
            ["AWS/EC2", "CPUUtilization", "InstanceId", var.control_instance_id],
            ["AWS/EC2", "NetworkIn", "InstanceId", var.control_instance_id, { yAxis = "right", stat = "Sum" }],
            ["AWS/EC2", "NetworkOut", "InstanceId", var.control_instance_id, { yAxis = "right", stat = "Sum" }],
          ]
        }
      },
      {
        type = "metric", x = 0, y = 6, width = 12, height = 6
        properties = {
          title   = "Estimated availability of spot (alpha)", region = var.region, stat = "Average", period = 60, view = "timeSeries"
          yAxis   = { left = { min = 0, max = 1 } }
          metrics = [["DOLL", "doll_provisioner_availability", "Cluster", var.name, { label = "alpha" }]]
        }
      },
      {
        type = "metric", x = 12, y = 6, width = 12, height = 6
        properties = {
          title = "Cost of the workers so far, USD", region = var.region, stat = "Maximum", period = 60, view = "timeSeries"
          yAxis = { left = { min = 0 } }
          metrics = [
            ["DOLL", "doll_provisioner_spent_usd", "Cluster", var.name, { label = "spent" }],
            ["DOLL", "doll_provisioner_all_on_demand_usd", "Cluster", var.name, { label = "the same work, all on-demand" }],
          ]
        }
      },
      {
        type = "log", x = 0, y = 12, width = 24, height = 8
        properties = {
          title = "Decisions of the provisioner", region = var.region, view = "table"
          query = "SOURCE '${var.roles_log_group}' | fields @timestamp, @message | filter @logStream like /doll-provision/ | sort @timestamp desc | limit 100"
        }
      },
      {
        type = "log", x = 0, y = 20, width = 24, height = 8
        properties = {
          title = "Warnings and errors", region = var.region, view = "table"
          query = "SOURCE '${var.roles_log_group}' | fields @timestamp, @logStream, @message | filter @message like /warning|error/ | sort @timestamp desc | limit 100"
        }
      },
    ]
  })
}
