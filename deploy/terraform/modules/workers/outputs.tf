output "launch_template_id" {
  description = "Launch template of the workers."
  value       = aws_launch_template.this.id
}

output "launch_template_arn" {
  description = "ARN of the launch template."
  value       = aws_launch_template.this.arn
}

output "launch_template_version" {
  description = "Newest version of the launch template, from which the provisioner launches."
  value       = aws_launch_template.this.latest_version
}

output "role_arn" {
  description = "Role of the workers, which the provisioner passes to EC2."
  value       = module.role.role_arn
}
