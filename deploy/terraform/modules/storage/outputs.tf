output "kms_key_arn" {
  description = "The stack's key."
  value       = aws_kms_key.this.arn
}

output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "repository_url" {
  description = "Repository to which the image is pushed."
  value       = aws_ecr_repository.this.repository_url
}

output "repository_name" {
  description = "Name of the image repository."
  value       = aws_ecr_repository.this.name
}

output "repository_arn" {
  description = "ARN of the image repository."
  value       = aws_ecr_repository.this.arn
}

output "roles_log_group" {
  description = "Log group of all containers."
  value       = { name = aws_cloudwatch_log_group.this["roles"].name, arn = aws_cloudwatch_log_group.this["roles"].arn }
}

output "flow_log_group_arn" {
  description = "Log group of the VPC's flow logs."
  value       = aws_cloudwatch_log_group.this["flows"].arn
}

output "flow_log_role_arn" {
  description = "Role that writes the flow logs."
  value       = aws_iam_role.flows.arn
}
