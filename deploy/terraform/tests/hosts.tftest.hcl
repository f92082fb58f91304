# Hosts by themselves, by the real provider: what EC2 is asked to protect.

provider "aws" {
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

variables {
  name              = "clicks"
  region            = "us-east-1"
  ami_id            = "ami-0123456789abcdef0"
  policy_json       = "{}"
  network_ready     = true
  security_group_id = "sg-0123456789abcdef0"
}

run "brokers_are_protected_from_termination" {
  command = plan

  module {
    source = "./modules/kafka"
  }

  variables {
    mode              = "self_managed"
    broker_count      = 3
    volume_gb         = 100
    subnet_ids        = ["subnet-0", "subnet-1", "subnet-2"]
    zones             = ["us-east-1a", "us-east-1b", "us-east-1c"]
    private_ips       = ["10.0.0.11", "10.0.16.12", "10.0.32.13"]
    kms_key_arn       = "arn:aws:kms:us-east-1:123456789012:key/none"
    log_group         = "/doll/clicks/roles"
    instance_type     = "m7g.medium"
    msk_instance_type = "kafka.m7g.large"
    msk_kafka_version = "3.9.x"
    msk_secret_arns   = []
  }

  assert {
    condition     = length(aws_instance.node) == 3 && alltrue([for node in aws_instance.node : node.disable_api_termination])
    error_message = "a broker, with its copy of the log, can be terminated by one call"
  }
}

run "the_control_host_with_the_cache_is_protected_from_termination" {
  command = plan

  module {
    source = "./modules/control"
  }

  variables {
    instance_type      = "m6i.xlarge"
    volume_gb          = 50
    subnet_id          = "subnet-0"
    private_ip         = "10.0.0.10"
    security_group_ids = ["sg-0123456789abcdef0"]
    environment        = {}
    settings           = {}
    shards             = 2
  }

  assert {
    condition     = join(" ", slice(output.restart_units, 4, 7)) == "doll-role@provision doll-role@shard-0 doll-role@shard-1"
    error_message = "the host has no unit for each shard"
  }

  assert {
    condition     = aws_instance.this.disable_api_termination
    error_message = "the control host, with parameter server and cache, can be terminated by one call"
  }
}
