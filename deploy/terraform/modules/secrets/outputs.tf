output "clients_arn" {
  description = "Secret with the clients' user names and passwords, a docker env file."
  value       = aws_secretsmanager_secret.clients.arn
}

output "clients_name" {
  description = "Its name."
  value       = aws_secretsmanager_secret.clients.name
}

output "producer_arn" {
  description = "Secret with the user name and password of external producers; null if they use IAM."
  value       = one(aws_secretsmanager_secret.producer[*].arn)
}

output "producer_name" {
  description = "Its name."
  value       = one(aws_secretsmanager_secret.producer[*].name)
}

output "msk_arn" {
  description = "Secret that MSK reads; null if there is none."
  value       = var.kafka_mode == "msk" ? aws_secretsmanager_secret_version.msk[0].arn : null
}

output "authority_arns" {
  description = "Secrets of the stack's certificate authorities: kafka, cache."
  value       = { for key, secret in aws_secretsmanager_secret.authority : key => secret.arn }
}

output "schema_registry_arn" {
  description = "Secret with the log-in at the schema registry; null if it needs none."
  value       = one(aws_secretsmanager_secret.schema_registry[*].arn)
}

output "schema_registry_name" {
  description = "Its name."
  value       = one(aws_secretsmanager_secret.schema_registry[*].name)
}
