variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "ami_id" {
  description = "Machine image; it must contain docker."
  type        = string
}

variable "volume_gb" {
  description = "Size of the root volume, GB."
  type        = number
}

variable "security_group_id" {
  description = "The workers' security group."
  type        = string
}

variable "user_data" {
  description = "cloud-init document."
  type        = string
}

variable "policy_json" {
  description = "IAM policy of a worker."
  type        = string
}
