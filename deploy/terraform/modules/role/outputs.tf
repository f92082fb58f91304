output "role_arn" {
  description = "The role."
  value       = aws_iam_role.this.arn
}

output "role_name" {
  description = "The role's name."
  value       = aws_iam_role.this.name
}

output "profile_arn" {
  description = "Its instance profile."
  value       = aws_iam_instance_profile.this.arn
}

output "profile_name" {
  description = "The instance profile's name."
  value       = aws_iam_instance_profile.this.name
}
