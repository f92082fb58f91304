output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "private_subnet_ids" {
  description = "Private subnets, the control host's zone first."
  value       = [for zone in var.zones : aws_subnet.private[zone].id]
}

output "reserved_cidrs" {
  description = "Reserved addresses of the private subnets for hosts with a fixed address, in the same order."
  value       = [for zone in var.zones : aws_ec2_subnet_cidr_reservation.fixed[zone].cidr_block]
}

output "security_group_ids" {
  description = "control, worker, kafka, cache, producer."
  value = {
    control  = aws_security_group.control.id
    worker   = aws_security_group.worker.id
    kafka    = aws_security_group.kafka.id
    cache    = aws_security_group.cache.id
    producer = aws_security_group.producer.id
  }
}

# Hosts fetch packages and images at boot, so egress must exist first.
output "ready" {
  description = "Dependency of everything that boots a host: routes, endpoints and rules exist."
  value = {
    routes    = [for route in aws_route.nat : route.id]
    tables    = [for association in aws_route_table_association.private : association.id]
    internet  = aws_route.internet.id
    endpoints = concat([aws_vpc_endpoint.s3.id], [for endpoint in aws_vpc_endpoint.interface : endpoint.id])
    rules     = [for rule in aws_vpc_security_group_egress_rule.https : rule.id]
  }
}
