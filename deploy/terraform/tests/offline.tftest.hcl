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
  name        = "test"
  image_tag   = "v1"
  alarm_email = "a@example.com"
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
# Unknown before the apply, and a test takes a check that cannot be evaluated as failed.
override_resource {
  target          = module.observability.aws_sns_topic_subscription.email
  override_during = plan
  values          = { pending_confirmation = false }
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
    cache_arn            = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/cache-abcdef"
    worker_arn           = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/worker-abcdef"
    worker_name          = "doll/test/worker"
    msk_arns = [
      "arn:aws:secretsmanager:us-east-1:123456789012:secret:AmazonMSK_doll_test-abcdef",
      "arn:aws:secretsmanager:us-east-1:123456789012:secret:AmazonMSK_doll_test_worker-abcdef",
    ]
    authority_arns = {
      kafka = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/kafka-authority-abcdef"
      cache = "arn:aws:secretsmanager:us-east-1:123456789012:secret:doll/test/cache-authority-abcdef"
    }
  }
}

run "self_managed" {
  command = plan
  variables {
    kafka_mode            = "self_managed"
    nat_mode              = "per_az"
    worker_instance_types = ["c5.xlarge", "c5a.xlarge", "m5.xlarge"]
  }
  assert {
    condition = toset([
      for statement in data.aws_iam_policy_document.control.statement : join(" ", concat(
        tolist(statement.actions),
        flatten([for condition in statement.condition : [condition.test, condition.values] if condition.variable == "ec2:InstanceType"]),
      )) if startswith(statement.sid, "LaunchWorkerTypes")
      ]) == toset([
      "ec2:CreateFleet StringEqualsIfExists c5.xlarge c5a.xlarge m5.xlarge",
      "ec2:RunInstances StringEquals c5.xlarge c5a.xlarge m5.xlarge",
    ])
    error_message = "the provisioner may launch machines of other types than the workers'"
  }
}

run "msk_and_all_that_is_optional" {
  command = plan
  variables {
    kafka_mode                      = "msk"
    cache_mode                      = "elasticache"
    nat_mode                        = "none"
    budget_usd_per_month            = 500
    create_spot_service_linked_role = true
    producer_cidrs                  = ["10.1.0.0/16"]
    worker_ami_id                   = "ami-0123456789abcdef0"
    schema_registry_login           = true
    schema_registry_ca              = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    schema_registry_cidrs           = ["10.1.0.0/16", "10.2.0.0/16"]
  }
}

run "workers_in_a_function" {
  command = plan
  override_data {
    target = module.function[0].data.aws_caller_identity.this
    values = { account_id = "123456789012" }
  }
  variables {
    function_image_tag    = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
    schema_registry_login = true
  }
  assert {
    condition = toset(flatten([
      for statement in data.aws_iam_policy_document.control.statement : tolist(statement.actions) if contains(["InvokeWorkers", "AccountConcurrency", "ImageSize"], statement.sid)
      ])) == toset([
      "lambda:InvokeFunction", "lambda:GetFunction", "lambda:GetFunctionConcurrency", "lambda:GetAccountSettings", "ecr:DescribeImages",
    ])
    error_message = "the provisioner lacks rights for the function, or has more"
  }
}

run "msk_serverless" {
  command = plan
  variables {
    kafka_mode = "msk_serverless"
  }
  expect_failures = [check.serverless_needs_iam_login]
}
