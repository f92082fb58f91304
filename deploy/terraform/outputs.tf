output "environment" {
  description = "Environment of doll's containers (SSM parameter /doll/NAME/environment); no secrets."
  value       = local.environment
}

output "settings" {
  description = "Job settings of the stack, passed by --set to every command on its hosts (SSM parameter /doll/NAME/settings)."
  value       = local.settings
}

output "names" {
  description = "Names and ids of resources."
  value = {
    bucket                 = module.storage.bucket
    repository             = module.storage.repository_url
    clients_secret         = module.secrets.clients_name
    worker_secret          = module.secrets.worker_name
    producer_secret        = module.secrets.producer_name
    schema_registry_secret = module.secrets.schema_registry_name
    producer_policy        = one(aws_iam_policy.producer[*].arn)
    producer_bootstrap     = module.kafka.producer_bootstrap
    control_instance       = module.control.instance_id
    kafka_instances        = module.kafka.instance_ids
    function               = one(module.function[*].name)
    launch_template        = module.workers.launch_template_id
    producer_group         = module.network.security_group_ids.producer
    vpc                    = module.network.vpc_id
    private_subnets        = module.network.private_subnet_ids
    notices_queue          = module.observability.queue_url
    alarm_topic            = module.observability.alarm_topic_arn
    dashboard              = module.observability.dashboard
    log_group              = module.storage.roles_log_group.name
    control_role           = module.control.role_name
    authority_in_bucket    = [for name in local.authorities : "ca/${name}.pem"]
    worker_ami             = coalesce(var.worker_ami_id, local.ami[var.worker_instance_types[0]])
    worker_architecture    = local.arm64[var.worker_instance_types[0]] ? "linux/arm64" : "linux/amd64"
    control_architecture   = local.arm64[var.control_instance_type] ? "linux/arm64" : "linux/amd64"
  }
}

output "next" {
  description = "The next steps, in this order; for scripts: `terraform output -json next`."
  value = {
    "1_log_in_to_registry" = "aws ecr get-login-password --region ${var.region} | docker login --username AWS --password-stdin ${split("/", module.storage.repository_url)[0]}"
    "2_push_image"         = "docker build --platform ${local.arm64[var.worker_instance_types[0]] ? "linux/arm64" : "linux/amd64"} -t ${local.image} . && docker push ${local.image}"
    "3_push_job"           = "tar -czf - -C FOLDER_WITH_JOB_YAML . | aws s3 cp --region ${var.region} - s3://${module.storage.bucket}/job/job.tar.gz"
    "4_watch_it_start"     = "aws logs tail --region ${var.region} --follow ${module.storage.roles_log_group.name}"
    "5_shell_on_control"   = "aws ssm start-session --region ${var.region} --target ${module.control.instance_id}"
    "apply_changes"        = "aws ssm send-command --region ${var.region} --instance-ids ${module.control.instance_id} --document-name AWS-RunShellScript --parameters 'commands=[\"systemctl restart --no-block ${join(" ", module.control.restart_units)}\"]'"
    "before_destroy"       = "aws ssm send-command --region ${var.region} --instance-ids ${module.control.instance_id} --document-name AWS-RunShellScript --parameters 'commands=[\"/opt/doll/drain.sh\"]'"
  }
}
