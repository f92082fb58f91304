variable "environment" {
  description = "Settings that the scripts read from /etc/doll/boot.env; no secrets."
  type        = map(string)

  validation {
    condition     = alltrue([for value in values(var.environment) : can(regex("^[A-Za-z0-9@:/.,_-]*$", value))])
    error_message = "Expected letters, digits and @:/.,_- only: a shell reads these values."
  }
}

variable "scripts" {
  description = "Names of the scripts in files/, without .sh; common is always there."
  type        = list(string)
}

variable "units" {
  description = "File names of the systemd units in files/."
  type        = list(string)
}

variable "start" {
  description = "Units that are started at each boot."
  type        = list(string)
}
