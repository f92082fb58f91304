output "url" {
  description = "rediss://host:port/0, without credentials."
  value = (
    var.mode == "self_managed"
    ? "rediss://${var.control_address}:6379/0"
    : "rediss://${aws_elasticache_replication_group.this[0].primary_endpoint_address}:6379/0"
  )
}

output "password" {
  description = "Password of ElastiCache's user; null with self_managed, whose password is not in the state."
  value       = var.mode == "elasticache" ? terraform_data.password[0].output : null
  sensitive   = true
}
