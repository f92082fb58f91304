variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "image" {
  description = "Image in the stack's repository, with its tag or digest: doll, its extra lambda, and the job's folder in /var/task."
  type        = string
}

variable "repository_name" {
  description = "The stack's repository."
  type        = string
}

variable "is_arm64" {
  description = "Whether the image is for arm64."
  type        = bool
}

variable "memory_mb" {
  description = "Memory, which also determines the share of a CPU."
  type        = number
}

variable "timeout_s" {
  description = "Time limit of an invocation."
  type        = number
}

variable "ephemeral_mb" {
  description = "Size of /tmp."
  type        = number
}

variable "concurrency" {
  description = "Reserved concurrency."
  type        = number
}

variable "subnet_ids" {
  description = "Subnets from which Kafka and Redis can be reached."
  type        = list(string)
}

variable "security_group_id" {
  description = "The workers' security group."
  type        = string
}

variable "kms_key_arn" {
  description = "The stack's key."
  type        = string
}

variable "log_retention_days" {
  description = "Days for which CloudWatch keeps the function's log."
  type        = number
}

variable "environment" {
  description = "Environment variables: addresses and the names of secrets, no passwords."
  type        = map(string)
}

variable "policy_json" {
  description = "IAM policy of a worker in a function."
  type        = string
}
