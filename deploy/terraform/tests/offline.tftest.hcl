# The real provider's own checks on every mode, with keys that are none and no call to AWS: what asks AWS is overridden.

provider "aws" {
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

provider "aws" {
  alias                       = "passwords"
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

variables {
  name      = "test"
  image_tag = "v1"
}

override_data {
  target = data.aws_availability_zones.this
  values = { names = ["us-east-1a", "us-east-1b", "us-east-1c"] }
}
override_data {
  target = data.aws_ssm_parameter.ami
  values = { insecure_value = "ami-0123456789abcdef0" }
}
override_data {
  target = data.aws_caller_identity.this
  values = { account_id = "123456789012" }
}
override_data {
  target = module.storage.data.aws_caller_identity.this
  values = { account_id = "123456789012" }
}
override_data {
  target = module.observability.data.aws_caller_identity.this
  values = { account_id = "123456789012" }
}
override_data {
  target = module.cache.data.aws_secretsmanager_random_password.this
  values = { random_password = "none" }
}

# Real passwords are made where the stack is applied, as by make tf-apply-local.
override_module {
  target = module.secrets
  outputs = {
    clients_arn          = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/clients-abcdef"
    clients_name         = "doll/test/clients"
    producer_arn         = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/producer-abcdef"
    producer_name        = "doll/test/producer"
    schema_registry_arn  = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/schema-registry-abcdef"
    schema_registry_name = "doll/test/schema-registry"
    msk_arn              = "arn:aws:secretsmanager:us-east-1:123456789012:secret:AmazonMSK_doll_test-abcdef"
    authority_arns = {
      kafka = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/kafka-authority-abcdef"
      cache = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/cache-authority-abcdef"
    }
  }
}

run "self_managed" {
  command = plan
  variables {
    kafka_mode = "self_managed"
    nat_mode   = "per_az"
  }
}

run "msk_and_all_that_is_optional" {
  command = plan
  variables {
    kafka_mode                      = "msk"
    cache_mode                      = "elasticache"
    nat_mode                        = "none"
    budget_usd_per_month            = 500
    alarm_email                     = "a@example.com"
    create_spot_service_linked_role = true
    producer_cidrs                  = ["10.1.0.0/16"]
    worker_ami_id                   = "ami-0123456789abcdef0"
    schema_registry_login           = true
    schema_registry_ca              = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    schema_registry_cidrs           = ["10.1.0.0/16", "10.2.0.0/16"]
  }
}

run "msk_serverless" {
  command = plan
  variables {
    kafka_mode = "msk_serverless"
  }
  expect_failures = [check.serverless_needs_iam_login]
}
