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
  value       = aws_sns_topic.alarms.arn
}

output "dashboard" {
  description = "Name of the dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}
