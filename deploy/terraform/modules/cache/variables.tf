variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "mode" {
  description = "self_managed: beside the parameter server, nothing to make here. elasticache: Valkey, two zones."
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
  description = "Key of what is stored."
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
