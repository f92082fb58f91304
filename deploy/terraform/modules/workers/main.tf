# A launch template only. The provisioner chooses instance types, markets and numbers.

module "role" {
  source = "../role"

  name        = var.name
  host        = "worker"
  policy_json = var.policy_json
}

resource "aws_launch_template" "this" {
  name        = "doll-${var.name}-worker"
  description = "Worker of ${var.name}, without market and instance type"
  image_id    = var.ami_id
  user_data   = base64gzip(var.user_data)

  update_default_version               = true
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    arn = module.role.profile_arn
  }

  # Containers share the host's network, so one hop is enough. The tags contain the slot.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  network_interfaces {
    device_index                = 0
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = [var.security_group_id]
  }

  # With AWS's key for volumes: a separate key would need a grant for spot's service-linked role.
  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.volume_gb
      encrypted             = true
      delete_on_termination = true
    }
  }

  # No tag_specifications: a tagged spot-instances-request would break on-demand launches, and the provisioner tags
  # the instance with its slot anyway.
}
