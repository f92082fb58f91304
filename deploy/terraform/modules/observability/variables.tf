variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "region" {
  description = "Region of the stack."
  type        = string
}

variable "kms_key_arn" {
  description = "Key of the alarm topic."
  type        = string
}

variable "control_instance_id" {
  description = "The control host."
  type        = string
}

variable "roles_log_group" {
  description = "Log group of all containers."
  type        = string
}

variable "alarm_email" {
  description = "E-mail address for alarms; null: none."
  type        = string
}

variable "alarm_topic_arn" {
  description = "SNS topic for alarms; null: one is created."
  type        = string
}

variable "budget_usd_per_month" {
  description = "Budget of the stack, USD per month; 0: none."
  type        = number
}
