# The function by itself, by the real provider.

provider "aws" {
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.this
  values = { account_id = "123456789012" }
}

variables {
  name               = "clicks"
  image              = "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll-clicks:f1"
  repository_name    = "doll-clicks"
  is_arm64           = false
  memory_mb          = 1769
  timeout_s          = 900
  ephemeral_mb       = 512
  concurrency        = 8
  subnet_ids         = ["subnet-0", "subnet-1"]
  security_group_id  = "sg-0123456789abcdef0"
  kms_key_arn        = "arn:aws:kms:us-east-1:123456789012:key/00000000-0000-0000-0000-000000000000"
  log_retention_days = 30
  policy_json        = "{\"Version\":\"2012-10-17\",\"Statement\":[]}"
  environment        = { DOLL_KAFKA = "b-1:9096" }
}

run "a_function_is_as_its_job_file_says" {
  command = plan

  module {
    source = "./modules/function"
  }

  assert {
    condition     = aws_lambda_function.this.memory_size == 1769 && aws_lambda_function.this.timeout == 900 && aws_lambda_function.this.reserved_concurrent_executions == 8
    error_message = "memory, time limit or concurrency are not those that were given"
  }
  assert {
    condition     = aws_lambda_function_event_invoke_config.this.maximum_retry_attempts == 0
    error_message = "AWS repeats events of workers that DOLL has replaced"
  }
  assert {
    condition     = toset(aws_lambda_function.this.vpc_config[0].subnet_ids) == toset(["subnet-0", "subnet-1"]) && toset(aws_lambda_function.this.vpc_config[0].security_group_ids) == toset(["sg-0123456789abcdef0"])
    error_message = "the function does not reach Kafka and Redis"
  }
  assert {
    condition     = aws_lambda_function.this.image_config[0].command == tolist(["doll.run.function.handle"])
    error_message = "the image does not start the handler"
  }
  assert {
    condition = length([
      for statement in data.aws_iam_policy_document.this.statement : statement
      if statement.effect == "Deny" && contains(statement.actions, "ec2:CreateNetworkInterface")
    ]) == 1
    error_message = "the task's code may make network interfaces"
  }
}
