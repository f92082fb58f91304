output "queue_url" {
  description = "Queue of the interruption notices."
  value       = aws_sqs_queue.notices.url
}

output "queue_arn" {
  description = "ARN of the queue."
  value       = aws_sqs_queue.notices.arn
}

output "alarm_topic_arn" {
  description = "Topic of the alarms."
  value       = local.alarms
}

output "alarm_email_is_confirmed" {
  description = "The owner of alarm_email has confirmed the subscription; null without one."
  value       = one([for subscription in aws_sns_topic_subscription.email : !subscription.pending_confirmation])
}

output "dashboard" {
  description = "Name of the dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}
