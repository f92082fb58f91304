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

variable "authorities" {
  description = "Certificates (PEM) of authorities outside the stack, by name: ca/NAME.pem in the bucket."
  type        = map(string)
}
