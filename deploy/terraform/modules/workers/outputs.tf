output "launch_template_id" {
  description = "Launch template of the workers."
  value       = aws_launch_template.this.id
}

output "launch_template_arn" {
  description = "ARN of the launch template."
  value       = aws_launch_template.this.arn
}

output "launch_template_version" {
  description = "Newest version of the launch template; the provisioner launches from this one until it is told otherwise."
  value       = aws_launch_template.this.latest_version
}

output "role_arn" {
  description = "Role of the workers, which the provisioner passes on."
  value       = module.role.role_arn
}
