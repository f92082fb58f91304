variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "region" {
  description = "Region of the stack."
  type        = string
}

variable "ami_id" {
  description = "Image of the machine: it must have docker."
  type        = string
}

variable "instance_type" {
  description = "Type of the machine; always on-demand."
  type        = string
}

variable "volume_gb" {
  description = "Size of the root volume, GB."
  type        = number
}

variable "subnet_id" {
  description = "Private subnet, the one that the workers prefer too."
  type        = string
}

variable "private_ip" {
  description = "Address, fixed: workers find the cache there."
  type        = string
}

variable "security_group_ids" {
  description = "Security groups: control, and cache where the cache is self-managed."
  type        = list(string)
}

variable "policy_json" {
  description = "What the host may do."
  type        = string
}

variable "environment" {
  description = "docker env file of all of doll's containers; names that begin with DOLL_BOOT_ are the boot scripts'."
  type        = map(string)
}

variable "settings" {
  description = "Job settings that follow from this stack, key to value in YAML: `--set` of every command."
  type        = map(string)
}

variable "network_ready" {
  description = "The way out of the private subnets: the host boots after it."
  type        = any
}
