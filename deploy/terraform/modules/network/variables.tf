variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "vpc_cidr" {
  description = "Address range of the VPC, a /16 to a /20."
  type        = string
}

variable "zones" {
  description = "Availability zones, the control host's first."
  type        = list(string)
}

variable "nat_mode" {
  description = "single, per_az or none."
  type        = string
}

variable "endpoint_services" {
  description = "AWS services that get an interface endpoint in each zone; used with nat_mode none only."
  type        = list(string)
}

variable "kafka_client_port" {
  description = "TCP port of Kafka for clients."
  type        = number
}

variable "producer_port" {
  description = "Port of the brokers for external producers."
  type        = number
}

variable "producer_cidrs" {
  description = "Address ranges of external producers."
  type        = list(string)
}

variable "schema_registry_cidrs" {
  description = "Address ranges of a schema registry whose port is not 443."
  type        = list(string)
}

variable "schema_registry_port" {
  description = "Its port."
  type        = number
}

variable "flow_log_group_arn" {
  description = "Log group of the VPC's flow logs."
  type        = string
}

variable "flow_log_role_arn" {
  description = "Role that writes the flow logs."
  type        = string
}
