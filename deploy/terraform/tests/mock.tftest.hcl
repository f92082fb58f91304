# Wiring, variables and every mode, without AWS and without the provider's own logic: everything is made up.

mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
  }
  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c"] }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { name = "us-east-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { insecure_value = "ami-0123456789abcdef0" }
  }
  mock_resource "aws_subnet" {
    defaults = { id = "subnet-0123456789abcdef0" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::doll-test-1", bucket = "doll-test-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/test" }
  }
  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/test" }
  }
  mock_resource "aws_cloudwatch_log_group" {
    defaults = { arn = "arn:aws:logs:us-east-1:123456789012:log-group:/doll/test/roles" }
  }
  mock_resource "aws_ecr_repository" {
    defaults = {
      arn            = "arn:aws:ecr:us-east-1:123456789012:repository/doll-test"
      repository_url = "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll-test"
    }
  }
  mock_resource "aws_sqs_queue" {
    defaults = {
      arn = "arn:aws:sqs:us-east-1:123456789012:doll-test-notices"
      url = "https://sqs.us-east-1.amazonaws.com/123456789012/doll-test-notices"
    }
  }
  mock_resource "aws_sns_topic" {
    defaults = { arn = "arn:aws:sns:us-east-1:123456789012:doll-test-alarms" }
  }
  mock_resource "aws_cloudwatch_event_rule" {
    defaults = { arn = "arn:aws:events:us-east-1:123456789012:rule/doll-test" }
  }
  mock_resource "aws_launch_template" {
    defaults = {
      id             = "lt-0123456789abcdef0"
      arn            = "arn:aws:ec2:us-east-1:123456789012:launch-template/lt-0123456789abcdef0"
      latest_version = 3
    }
  }
  mock_resource "aws_lambda_function" {
    defaults = { arn = "arn:aws:lambda:us-east-1:123456789012:function:doll-test-worker" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/test-producer" }
  }
  mock_resource "aws_ebs_volume" {
    defaults = { id = "vol-0123456789abcdef0" }
  }
  mock_resource "aws_msk_cluster" {
    defaults = {
      arn                          = "arn:aws:kafka:us-east-1:123456789012:cluster/doll-test/11111111-1111-1111-1111-111111111111-1"
      bootstrap_brokers_sasl_scram = "b-1.test:9096,b-2.test:9096,b-3.test:9096"
      bootstrap_brokers_sasl_iam   = "b-1.test:9098,b-2.test:9098,b-3.test:9098"
    }
  }
  mock_resource "aws_msk_serverless_cluster" {
    defaults = {
      arn                        = "arn:aws:kafka:us-east-1:123456789012:cluster/doll-test/22222222-2222-2222-2222-222222222222-1"
      bootstrap_brokers_sasl_iam = "boot.test:9098"
    }
  }
  mock_resource "aws_msk_configuration" {
    defaults = { arn = "arn:aws:kafka:us-east-1:123456789012:configuration/doll-test/1", latest_revision = 1 }
  }
  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "master.test.cache" }
  }
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

run "msk_is_the_default" {
  assert {
    condition     = output.environment.DOLL_KAFKA == "b-1.test:9096,b-2.test:9096,b-3.test:9096"
    error_message = "clients do not use MSK's addresses"
  }
  assert {
    condition     = output.settings["kafka.security"] == "sasl_ssl" && output.settings["kafka.replication_factor"] == "3"
    error_message = "Kafka is used without TLS and authentication, or records do not have three replicas"
  }
  assert {
    condition     = output.settings["fleet.launch_template_version"] == "3"
    error_message = "the provisioner does not launch from a fixed version"
  }
  assert {
    condition     = output.names.producer_bootstrap == "b-1.test:9098,b-2.test:9098,b-3.test:9098" && output.names.producer_policy != null && output.settings["kafka.producer_user"] == ""
    error_message = "external producers do not use IAM with MSK"
  }
  assert {
    condition     = output.environment.DOLL_REDIS == "rediss://10.64.128.10:6379/0" && output.environment.DOLL_REDIS_CA == "/run/doll/ca/cache.pem"
    error_message = "the cache is not on the control host, or its authority is missing"
  }
  assert {
    condition     = !contains(keys(output.environment), "DOLL_KAFKA_CA")
    error_message = "MSK's certificates come from a public authority"
  }
  assert {
    condition     = !contains(keys(output.environment), "DOLL_REGISTRY_CA") && output.environment.DOLL_BOOT_SCHEMA_REGISTRY_LOGIN == ""
    error_message = "hosts wait for a schema registry that nobody has named"
  }
  assert {
    condition     = output.environment.DOLL_BOOT_IMAGE == "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll-test:v1"
    error_message = "the image is not the one in the stack's repository"
  }
}

run "self_managed_kafka_in_two_zones" {
  variables {
    kafka_mode = "self_managed"
    zone_count = 2
  }
  assert {
    condition     = output.environment.DOLL_KAFKA == "10.64.128.11:9092,10.64.144.12:9092,10.64.128.13:9092"
    error_message = "brokers are not spread over the zones, at their fixed addresses"
  }
  assert {
    condition     = output.environment.DOLL_KAFKA_CA == "/run/doll/ca/kafka.pem" && output.environment.DOLL_BOOT_CERT_AUTHORITIES == "kafka cache"
    error_message = "clients do not get the stack's authorities"
  }
  assert {
    condition     = output.settings["kafka.producer_user"] == "doll-producer" && output.names.producer_secret == "doll/test/producer" && output.names.producer_policy == null
    error_message = "external producers have no separate user"
  }
}

run "one_broker_and_elasticache" {
  variables {
    kafka_mode         = "self_managed"
    kafka_broker_count = 1
    cache_mode         = "elasticache"
  }
  assert {
    condition     = output.environment.DOLL_KAFKA == "10.64.128.11:9092" && output.settings["kafka.replication_factor"] == "1"
    error_message = "a single broker has more than one replica"
  }
  assert {
    condition     = output.environment.DOLL_REDIS == "rediss://master.test.cache:6379/0" && output.environment.DOLL_BOOT_CACHE_IMAGE == ""
    error_message = "clients do not use ElastiCache, or a self-managed cache starts as well"
  }
}

run "serverless_and_all_that_is_optional" {
  variables {
    kafka_mode                      = "msk_serverless"
    nat_mode                        = "none"
    cache_image                     = "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll-test:valkey-8.1"
    budget_usd_per_month            = 500
    create_spot_service_linked_role = true
    producer_cidrs                  = ["10.1.0.0/16"]
    image_tag                       = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
    worker_instance_types           = ["c7g.xlarge", "c6g.xlarge", "m7g.xlarge"]
    control_instance_type           = "m7g.xlarge"
    shards                          = 3
  }
  assert {
    condition     = output.settings["ps.shards"] == "3"
    error_message = "the roles do not know how many shards the host has"
  }
  assert {
    condition     = strcontains(output.environment.DOLL_BOOT_IMAGE, "doll-test@sha256:")
    error_message = "a digest is not recognized"
  }
  assert {
    condition     = output.names.worker_architecture == "linux/arm64"
    error_message = "Graviton types are not recognized as arm64"
  }
  expect_failures = [check.serverless_needs_iam_login]
}

run "a_schema_registry_with_all_that_it_may_need" {
  variables {
    schema_registry_login = true
    schema_registry_ca    = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    schema_registry_cidrs = ["10.1.0.0/16"]
    schema_registry_port  = 8443
  }
  assert {
    condition     = output.environment.DOLL_REGISTRY_CA == "/run/doll/ca/registry.pem" && output.environment.DOLL_BOOT_CERT_AUTHORITIES == "cache registry"
    error_message = "workers do not verify the registry by the authority that was given"
  }
  assert {
    condition     = output.environment.DOLL_BOOT_SCHEMA_REGISTRY_LOGIN == "yes" && output.names.schema_registry_secret == "doll/test/schema-registry"
    error_message = "hosts do not wait for the registry's log-in"
  }
  assert {
    condition     = !strcontains(jsonencode(output.environment), "DOLL_REGISTRY_USERNAME") && !strcontains(jsonencode(output.environment), "BEGIN CERT")
    error_message = "a log-in or a certificate is among the settings"
  }
}

run "workers_in_a_function" {
  variables {
    kafka_mode         = "self_managed"
    function_image_tag = "f1"
    function_memory_mb = 3008
    function_timeout_s = 600
  }
  assert {
    condition = output.settings["fleet.kind"] == "lambda" && output.settings["fleet.function"] == "doll-test-worker" && output.settings["fleet.memory_mb"] == "3008" && output.settings["fleet.timeout_s"] == "600" && alltrue([
      for key in ["launch_template", "subnets", "queue_url"] : !contains(keys(output.settings), "fleet.${key}")
    ])
    error_message = "the provisioner's settings do not fit a function"
  }
  assert {
    condition     = output.names.function == "doll-test-worker" && output.environment.DOLL_KAFKA_CA == "/run/doll/ca/kafka.pem"
    error_message = "the function has no name, or hosts have lost their authorities"
  }
}

# --- who hears the alarms ---

run "without_a_receiver_the_plan_says_that_nobody_hears_the_alarms" {
  command = plan
  variables {
    alarm_email = null
  }
  expect_failures = [check.alarms_have_a_receiver]
}

run "alarms_go_to_a_topic_of_the_users" {
  variables {
    alarm_email     = null
    alarm_topic_arn = "arn:aws:sns:us-east-1:123456789012:oncall"
  }
  assert {
    condition     = output.names.alarm_topic == "arn:aws:sns:us-east-1:123456789012:oncall"
    error_message = "alarms do not go where the user wants them"
  }
}

run "an_address_that_nobody_has_confirmed_is_no_receiver" {
  command = plan
  override_resource {
    target          = module.observability.aws_sns_topic_subscription.email
    override_during = plan
    values          = { pending_confirmation = true }
  }
  expect_failures = [check.alarm_email_is_confirmed]
}

# --- invalid values ---

run "wrong_values" {
  command = plan
  variables {
    name                  = "a-name-that-does-not-fit"
    image_tag             = "latest"
    region                = "us-east-1a"
    zone_count            = 4
    vpc_cidr              = "10.0.0.0/8"
    producer_cidrs        = ["0.0.0.0/0"]
    worker_instance_types = ["c7g.xlarge", "c5.xlarge", "m5.xlarge"]
    worker_ami_id         = "c5.xlarge"
    cache_mode            = "memcached"
    control_instance_type = "xlarge"
    alarm_email           = "nobody"
    alarm_topic_arn       = "oncall"
    log_retention_days    = 2
    schema_registry_ca    = "-----BEGIN PRIVATE KEY-----"
    schema_registry_cidrs = ["0.0.0.0/0"]
    schema_registry_port  = 0
    shards                = 2.5
    function_image_tag    = "latest"
    function_memory_mb    = 64
    function_timeout_s    = 901
    function_ephemeral_mb = 100
    function_concurrency  = 1
  }
  expect_failures = [
    var.name, var.image_tag, var.region, var.zone_count, var.vpc_cidr, var.producer_cidrs, var.worker_instance_types,
    var.worker_ami_id, var.cache_mode, var.control_instance_type, var.alarm_email, var.alarm_topic_arn,
    var.log_retention_days,
    var.schema_registry_ca, var.schema_registry_cidrs, var.schema_registry_port, var.shards,
    var.function_image_tag, var.function_memory_mb, var.function_timeout_s, var.function_ephemeral_mb,
    var.function_concurrency,
  ]
}

# A quorum of two, public images without a way out, one instance type.
run "values_that_do_not_go_together" {
  command = plan
  variables {
    kafka_mode            = "self_managed"
    kafka_broker_count    = 2
    nat_mode              = "none"
    worker_instance_types = ["c5.xlarge"]
  }
  # Unknown before the apply, and a test takes a check that cannot be evaluated as failed.
  override_resource {
    target          = module.observability.aws_sns_topic_subscription.email
    override_during = plan
    values          = { pending_confirmation = false }
  }
  expect_failures = [var.kafka_broker_count, var.kafka_image, var.cache_image, var.worker_instance_types]
}
