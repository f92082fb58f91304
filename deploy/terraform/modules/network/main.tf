locals {
  # Public subnets are the first /20s (of a /16), private ones follow, so that adding a zone changes none.
  newbits = 4
  public  = { for i, zone in var.zones : zone => cidrsubnet(var.vpc_cidr, local.newbits, i) }
  private = { for i, zone in var.zones : zone => cidrsubnet(var.vpc_cidr, local.newbits, i + 8) }

  nat_zones = { single = slice(var.zones, 0, 1), per_az = var.zones, none = [] }[var.nat_mode]
  # The gateway that a zone's private subnet uses.
  nat_of = { for zone in var.zones : zone => contains(local.nat_zones, zone) ? zone : var.zones[0] if length(local.nat_zones) > 0 }

  endpoints = var.nat_mode == "none" ? toset(var.endpoint_services) : toset([])
}

data "aws_region" "this" {}

resource "aws_vpc" "this" {
  cidr_block           = var.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true

  tags = { Name = var.name }
}

# Without rules: resources without an explicit group have no access.
resource "aws_default_security_group" "this" {
  vpc_id = aws_vpc.this.id
}

resource "aws_flow_log" "this" {
  vpc_id                   = aws_vpc.this.id
  traffic_type             = "REJECT"
  log_destination          = var.flow_log_group_arn
  iam_role_arn             = var.flow_log_role_arn
  max_aggregation_interval = 600

  tags = { Name = var.name }
}

# --- subnets and routes ---

resource "aws_subnet" "public" {
  for_each = local.public

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = each.value

  tags = { Name = "${var.name}-public-${each.key}" }
}

resource "aws_subnet" "private" {
  for_each = local.private

  vpc_id            = aws_vpc.this.id
  availability_zone = each.key
  cidr_block        = each.value

  tags = { Name = "${var.name}-private-${each.key}" }
}

# Reserved for hosts with a fixed address: AWS does not assign these addresses automatically. They are .8 to .15 of each
# subnet; AWS itself uses the first four.
resource "aws_ec2_subnet_cidr_reservation" "fixed" {
  for_each = aws_subnet.private

  subnet_id        = each.value.id
  cidr_block       = "${cidrhost(each.value.cidr_block, 8)}/29"
  reservation_type = "explicit"
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id

  tags = { Name = var.name }
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id

  tags = { Name = "${var.name}-public" }
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_eip" "nat" {
  # checkov:skip=CKV2_AWS_19: it belongs to a NAT gateway, which checkov does not see through for_each
  for_each = toset(local.nat_zones)

  domain = "vpc"

  tags = { Name = "${var.name}-nat-${each.key}" }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  for_each = toset(local.nat_zones)

  allocation_id = aws_eip.nat[each.key].id
  subnet_id     = aws_subnet.public[each.key].id

  tags = { Name = "${var.name}-${each.key}" }
}

resource "aws_route_table" "private" {
  for_each = local.private

  vpc_id = aws_vpc.this.id

  tags = { Name = "${var.name}-private-${each.key}" }
}

resource "aws_route" "nat" {
  for_each = local.nat_of

  route_table_id         = aws_route_table.private[each.key].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[each.value].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[each.key].id
}

# --- endpoints ---

# Free of charge. Checkpoints, image layers and Amazon Linux's packages bypass the NAT gateway.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.this.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [for table in aws_route_table.private : table.id]

  tags = { Name = "${var.name}-s3" }
}

resource "aws_vpc_endpoint" "interface" {
  for_each = local.endpoints

  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${data.aws_region.this.name}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for subnet in aws_subnet.private : subnet.id]
  security_group_ids  = [aws_security_group.endpoints[0].id]

  tags = { Name = "${var.name}-${each.key}" }
}

# --- permitted connections ---

resource "aws_security_group" "control" {
  # checkov:skip=CKV2_AWS_5: the control module attaches it
  name_prefix = "${var.name}-control-"
  description = "Control host: parameter server, provisioner, evaluator, self-managed cache"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-control" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "worker" {
  # checkov:skip=CKV2_AWS_5: the workers' launch template attaches it
  name_prefix = "${var.name}-worker-"
  description = "Workers: no inbound access"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-worker" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "kafka" {
  # checkov:skip=CKV2_AWS_5: the kafka module attaches it
  name_prefix = "${var.name}-kafka-"
  description = "Kafka brokers"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-kafka" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "cache" {
  # checkov:skip=CKV2_AWS_5: the cache module attaches it, or the control host if the cache is self-managed
  name_prefix = "${var.name}-cache-"
  description = "Redis protocol, with TLS"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-cache" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "producer" {
  # checkov:skip=CKV2_AWS_5: users attach it to producers' machines
  name_prefix = "${var.name}-producer-"
  description = "For producers' machines: access to Kafka"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-producer" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "endpoints" {
  # checkov:skip=CKV2_AWS_5: the interface endpoints use it
  count = length(local.endpoints) > 0 ? 1 : 0

  name_prefix = "${var.name}-endpoints-"
  description = "Interface endpoints of AWS services"
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.name}-endpoints" }

  lifecycle {
    create_before_destroy = true
  }
}

locals {
  # from, to, port: both directions of each permitted path.
  paths = {
    worker_kafka      = { from = aws_security_group.worker.id, to = aws_security_group.kafka.id, port = var.kafka_client_port, what = "Kafka clients" }
    control_kafka     = { from = aws_security_group.control.id, to = aws_security_group.kafka.id, port = var.kafka_client_port, what = "Kafka clients" }
    producer_kafka    = { from = aws_security_group.producer.id, to = aws_security_group.kafka.id, port = var.producer_port, what = "Kafka producers" }
    broker_broker     = { from = aws_security_group.kafka.id, to = aws_security_group.kafka.id, port = 9091, what = "Kafka between brokers" }
    broker_controller = { from = aws_security_group.kafka.id, to = aws_security_group.kafka.id, port = 9093, what = "Kafka controller quorum" }
    worker_cache      = { from = aws_security_group.worker.id, to = aws_security_group.cache.id, port = 6379, what = "Redis protocol with TLS" }
    control_cache     = { from = aws_security_group.control.id, to = aws_security_group.cache.id, port = 6379, what = "Redis protocol with TLS" }
  }

  # The stack's hosts; ElastiCache and MSK need no egress.
  reach_aws = {
    control = aws_security_group.control.id
    worker  = aws_security_group.worker.id
    kafka   = aws_security_group.kafka.id
  }
}

resource "aws_vpc_security_group_ingress_rule" "path" {
  for_each = local.paths

  security_group_id            = each.value.to
  referenced_security_group_id = each.value.from
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = each.value.what
}

resource "aws_vpc_security_group_egress_rule" "path" {
  for_each = local.paths

  security_group_id            = each.value.from
  referenced_security_group_id = each.value.to
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = each.value.port
  description                  = each.value.what
}

resource "aws_vpc_security_group_ingress_rule" "producers" {
  for_each = toset(var.producer_cidrs)

  security_group_id = aws_security_group.kafka.id
  cidr_ipv4         = each.key
  ip_protocol       = "tcp"
  from_port         = var.producer_port
  to_port           = var.producer_port
  description       = "Producers outside the VPC"
}

resource "aws_vpc_security_group_egress_rule" "https" {
  for_each = local.reach_aws

  security_group_id = each.value
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "AWS services and image registries"
}

# Workers ask for schemas, and `doll doctor` does on the control host.
resource "aws_vpc_security_group_egress_rule" "schema_registry" {
  for_each = {
    for pair in setproduct(["control", "worker"], var.schema_registry_cidrs) : join(" ", pair) => {
      group = local.reach_aws[pair[0]]
      cidr  = pair[1]
    }
  }

  security_group_id = each.value.group
  cidr_ipv4         = each.value.cidr
  ip_protocol       = "tcp"
  from_port         = var.schema_registry_port
  to_port           = var.schema_registry_port
  description       = "Schema registry"
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = length(local.endpoints) > 0 ? 1 : 0

  security_group_id = aws_security_group.endpoints[0].id
  cidr_ipv4         = var.vpc_cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "Hosts of this VPC"
}
