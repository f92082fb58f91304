variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "kms_key_arn" {
  description = "Key of the secrets."
  type        = string
}

variable "kafka_mode" {
  description = "msk, self_managed or msk_serverless."
  type        = string
}

variable "worker_user" {
  description = "Kafka's user for workers."
  type        = string
}

variable "producer_user" {
  description = "self_managed: Kafka's user for external producers."
  type        = string
}

variable "cache_mode" {
  description = "self_managed or elasticache."
  type        = string
}

variable "cache_password" {
  description = "Password of the cache's user if it is set elsewhere; null: one is generated."
  type        = string
  sensitive   = true
}

variable "schema_registry_login" {
  description = "The schema registry asks for a log-in."
  type        = bool
}
