output "bootstrap" {
  description = "host:port[,host:port] for clients."
  value = {
    self_managed   = local.bootstrap
    msk            = one(aws_msk_cluster.this[*].bootstrap_brokers_sasl_scram)
    msk_serverless = one(aws_msk_serverless_cluster.this[*].bootstrap_brokers_sasl_iam)
  }[var.mode]
}

output "producer_bootstrap" {
  description = "The same for external producers."
  value = {
    self_managed   = local.bootstrap
    msk            = one(aws_msk_cluster.this[*].bootstrap_brokers_sasl_iam)
    msk_serverless = one(aws_msk_serverless_cluster.this[*].bootstrap_brokers_sasl_iam)
  }[var.mode]
}

output "cluster_arn" {
  description = "MSK cluster; null if Kafka is self-managed."
  value       = try(coalesce(one(aws_msk_cluster.this[*].arn), one(aws_msk_serverless_cluster.this[*].arn)), null)
}

output "instance_ids" {
  description = "Machines of the self-managed Kafka, by node id."
  value       = { for node, instance in aws_instance.node : node => instance.id }
}
