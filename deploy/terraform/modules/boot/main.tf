# The cloud-init document of a host: scripts, systemd units, their settings, and the units to start. It contains
# nothing that changes during the host's lifetime: image, addresses and secrets are fetched when the units start.

locals {
  environment = join("", [for key in sort(keys(var.environment)) : "${key}=${var.environment[key]}\n"])

  scripts = [for name in concat(["common"], var.scripts) : {
    path        = "/opt/doll/${name}.sh"
    permissions = "0755"
    content     = file("${path.module}/files/${name}.sh")
  }]

  units = [for name in var.units : {
    path        = "/etc/systemd/system/${name}"
    permissions = "0644"
    content     = file("${path.module}/files/${name}")
  }]

  document = join("\n", ["#cloud-config", yamlencode({
    write_files = concat(
      [{ path = "/etc/doll/boot.env", permissions = "0644", content = local.environment }],
      local.scripts,
      local.units,
    )
    runcmd = concat(
      # The machine image is made for ECS and contains its agent, which has no cluster to join here.
      [["systemctl", "mask", "--now", "--no-block", "ecs.service"], ["systemctl", "daemon-reload"]],
      [for unit in var.start : ["systemctl", "enable", "--now", "--no-block", unit]],
    )
  })])
}
