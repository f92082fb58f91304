output "document" {
  description = "The cloud-init document."
  value       = local.document

  precondition {
    condition     = length(base64gzip(local.document)) <= 16384
    error_message = "Expected at most 16 KiB of user data, EC2's limit."
  }
}
