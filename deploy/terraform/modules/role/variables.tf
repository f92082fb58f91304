variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "host" {
  description = "Kind of host: control, worker or kafka."
  type        = string
}

variable "policy_json" {
  description = "IAM policy of the host."
  type        = string
}
