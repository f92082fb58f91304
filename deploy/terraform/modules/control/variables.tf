variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "region" {
  description = "Region of the stack."
  type        = string
}

variable "ami_id" {
  description = "Machine image; it must contain docker."
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
  description = "Private subnet, which the workers prefer too."
  type        = string
}

variable "private_ip" {
  description = "Fixed address: workers connect to the cache there."
  type        = string
}

variable "security_group_ids" {
  description = "Security groups: control, and cache if it is self-managed."
  type        = list(string)
}

variable "policy_json" {
  description = "IAM policy of the host."
  type        = string
}

variable "environment" {
  description = "docker env file of all of doll's containers; names that begin with DOLL_BOOT_ are for the boot scripts."
  type        = map(string)
}

variable "settings" {
  description = "Job settings of this stack, key to value in YAML, passed by `--set` to every command."
  type        = map(string)
}

variable "shards" {
  description = "Number of shards of the model; 1: none, the parameter server has the whole model."
  type        = number
  default     = 1
}

variable "network_ready" {
  description = "Egress of the private subnets: the host boots after it."
  type        = any
}
