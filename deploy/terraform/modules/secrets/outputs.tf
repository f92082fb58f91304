output "clients_arn" {
  description = "Secret with Kafka's user of the control host's roles, a docker env file."
  value       = aws_secretsmanager_secret.clients.arn
}

output "clients_name" {
  description = "Its name."
  value       = aws_secretsmanager_secret.clients.name
}

output "cache_arn" {
  description = "Secret with the cache's user, a docker env file."
  value       = aws_secretsmanager_secret.cache.arn
}

output "worker_arn" {
  description = "Secret with Kafka's user of the workers, a docker env file."
  value       = aws_secretsmanager_secret.worker.arn
}

output "worker_name" {
  description = "Its name."
  value       = aws_secretsmanager_secret.worker.name
}

output "producer_arn" {
  description = "Secret with the user name and password of external producers; null if they use IAM."
  value       = one(aws_secretsmanager_secret.producer[*].arn)
}

output "producer_name" {
  description = "Its name."
  value       = one(aws_secretsmanager_secret.producer[*].name)
}

output "msk_arns" {
  description = "Secrets that MSK reads; none in the other modes."
  value       = [for version in aws_secretsmanager_secret_version.msk : version.arn]
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
