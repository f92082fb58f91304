variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket and a repository that are not empty."
  type        = bool
}

variable "log_retention_days" {
  description = "Days for which CloudWatch keeps logs."
  type        = number
}
