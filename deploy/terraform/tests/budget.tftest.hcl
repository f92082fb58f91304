# The budget by itself: the planned values are what AWS matches against the tags, letter by letter.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

run "budget" {
  command = plan

  module {
    source = "./modules/observability"
  }

  variables {
    name                 = "clicks"
    region               = "us-east-1"
    kms_key_arn          = "arn:aws:kms:us-east-1:123456789012:key/none"
    alarm_email          = "a@example.com"
    alarm_topic_arn      = null
    control_instance_id  = "i-0123456789abcdef0"
    roles_log_group      = "doll-clicks"
    budget_usd_per_month = 500
  }

  assert {
    condition     = toset(one(aws_budgets_budget.this[0].cost_filter).values) == toset(["user:doll:stack$clicks", "user:doll:cluster$clicks"])
    error_message = "the budget counts nothing: expected user:KEY$NAME of both tags"
  }
  assert {
    condition = toset([for notice in aws_budgets_budget.this[0].notification : "${notice.notification_type} ${notice.threshold}"]) == toset([
      "ACTUAL 80", "ACTUAL 100", "FORECASTED 100",
    ])
    error_message = "a budget without ACTUAL is silent until AWS has weeks of history for a forecast"
  }
}
