variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "mode" {
  description = "self_managed: on the control host, no resources here. elasticache: Valkey, two zones."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets."
  type        = list(string)
}

variable "security_group_id" {
  description = "The cache's security group."
  type        = string
}

variable "kms_key_arn" {
  description = "Encryption key of stored data."
  type        = string
}

variable "node_type" {
  description = "elasticache: type of the nodes."
  type        = string
}

variable "control_address" {
  description = "self_managed: address of the control host."
  type        = string
}
