variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "mode" {
  description = "msk, self_managed or msk_serverless."
  type        = string
}

variable "broker_count" {
  description = "Nodes: 1 or 3."
  type        = number
}

variable "volume_gb" {
  description = "Disk of each node for its log, GB."
  type        = number
}

variable "subnet_ids" {
  description = "Private subnets, one per zone."
  type        = list(string)
}

variable "zones" {
  description = "Zones of the subnets."
  type        = list(string)
}

variable "private_ips" {
  description = "self_managed: address of each node; node i is in subnet i modulo their number."
  type        = list(string)
}

variable "security_group_id" {
  description = "The brokers' security group."
  type        = string
}

variable "kms_key_arn" {
  description = "Encryption key of MSK's data."
  type        = string
}

variable "log_group" {
  description = "Log group of MSK's brokers."
  type        = string
}

variable "instance_type" {
  description = "self_managed: type of the nodes."
  type        = string
}

variable "ami_id" {
  description = "self_managed: machine image of the nodes; it must contain docker."
  type        = string
}

variable "region" {
  description = "self_managed: region of the nodes."
  type        = string
}

variable "policy_json" {
  description = "self_managed: IAM policy of a node."
  type        = string
}

variable "network_ready" {
  description = "self_managed: egress of the private subnets; nodes boot after it."
  type        = any
}

variable "msk_instance_type" {
  description = "msk: type of the brokers."
  type        = string
}

variable "msk_kafka_version" {
  description = "msk: version of Kafka."
  type        = string
}

variable "msk_secret_arns" {
  description = "msk: secrets with the clients' user names and passwords; their names begin with AmazonMSK_."
  type        = list(string)
}
