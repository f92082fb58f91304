output "instance_id" {
  description = "The control host."
  value       = aws_instance.this.id
}

output "role_name" {
  description = "Role of the control host."
  value       = module.role.role_name
}

output "restart_units" {
  description = "Units to restart after changes, in the order for systemctl restart."
  value       = concat(["doll-boot", "doll-cache"], local.services)
}
