# --- the stack ---

variable "name" {
  description = "Name of the stack and of its cluster: prefix of all resource names, value of the tags doll:stack and doll:cluster."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "Expected 3 to 20 of a-z, 0-9 and -, beginning with a letter and not ending with -: it goes into bucket, role and queue names."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "Expected a region such as us-east-1 (a region, not a zone such as us-east-1a)."
  }
}

variable "zone_count" {
  description = "Availability zones that the stack spans. Workers run in the control host's zone while it has capacity."
  type        = number
  default     = 3

  validation {
    condition     = contains([2, 3], var.zone_count)
    error_message = "Expected 2 or 3."
  }
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete checkpoints and images. Set it, and apply, before you destroy."
  type        = bool
  default     = false
}

variable "create_spot_service_linked_role" {
  description = "Create AWSServiceRoleForEC2Spot. An account that has used spot before has it, and only one can exist."
  type        = bool
  default     = false
}

# --- network ---

variable "vpc_cidr" {
  description = "Address range of the VPC."
  type        = string
  default     = "10.64.0.0/16"

  validation {
    condition     = can(cidrnetmask(var.vpc_cidr)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 20, false)
    error_message = "Expected an IPv4 range of /16 to /20 such as 10.64.0.0/16; one zone's private subnet is a sixteenth of it."
  }
}

variable "nat_mode" {
  description = "single: one NAT gateway. per_az: one per zone. none: interface endpoints instead; all images must then be in the stack's repository."
  type        = string
  default     = "single"

  validation {
    condition     = contains(["single", "per_az", "none"], var.nat_mode)
    error_message = "Expected single, per_az or none."
  }
}

variable "producer_cidrs" {
  description = "Address ranges outside the stack, for example of a peered VPC, from which producers may reach Kafka."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.producer_cidrs : can(cidrnetmask(cidr)) && try(tonumber(split("/", cidr)[1]) > 0, false)])
    error_message = "Expected IPv4 ranges such as 10.1.0.0/16, and not the whole internet."
  }
}

# --- image ---

variable "image_tag" {
  description = "Tag of doll's image in the stack's repository, or its digest, sha256:... Tags are immutable there."
  type        = string

  validation {
    condition     = can(regex("^([A-Za-z0-9_][A-Za-z0-9._-]{0,127}|sha256:[0-9a-f]{64})$", var.image_tag)) && var.image_tag != "latest"
    error_message = "Expected a tag or sha256:<64 hex digits>, and not latest: the running code must not change implicitly."
  }
}

# --- workers ---

variable "worker_instance_types" {
  description = "Instance types for workers, of similar size: more types make spot capacity more likely."
  type        = list(string)
  default     = ["c5.xlarge", "c5a.xlarge", "c6i.xlarge", "c6a.xlarge", "m5.xlarge", "m6i.xlarge"]

  validation {
    condition     = length(var.worker_instance_types) >= 3 && length(distinct(var.worker_instance_types)) == length(var.worker_instance_types)
    error_message = "Expected 3 types or more, each once (6 or more are better): with fewer, spot placement scores are always low."
  }

  validation {
    condition     = alltrue([for type in var.worker_instance_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", type))])
    error_message = "Expected instance types such as c5.xlarge."
  }

  validation {
    condition     = length(distinct([for type in var.worker_instance_types : can(regex("^[a-z]+[0-9]+g", type))])) <= 1
    error_message = "Expected types of one architecture: these mix x86-64 with arm64 (Graviton), and the launch template has one machine image."
  }
}

variable "worker_ami_id" {
  description = "Machine image of the workers, with docker; null: Amazon's newest for ECS. An image that contains doll's image boots a minute faster."
  type        = string
  default     = null

  validation {
    condition     = var.worker_ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.worker_ami_id))
    error_message = "Expected an id such as ami-0123456789abcdef0."
  }
}

variable "worker_volume_gb" {
  description = "Root volume of a worker, GB."
  type        = number
  default     = 30

  validation {
    condition     = var.worker_volume_gb >= 30 && var.worker_volume_gb <= 1000
    error_message = "Expected 30 to 1000 GB: the machine image needs 30."
  }
}

variable "worker_orphan_minutes" {
  description = "A worker without a heartbeat of the parameter server for this long shuts its machine down."
  type        = number
  default     = 20

  validation {
    condition     = var.worker_orphan_minutes >= 10 && var.worker_orphan_minutes <= 1440
    error_message = "Expected 10 to 1440 minutes: replacing the control host takes several."
  }
}

# --- workers in functions ---

variable "function_image_tag" {
  description = "Tag or digest, in the stack's repository, of an image for workers in functions on AWS Lambda (docs/guide/functions.md). null: workers are EC2 instances."
  type        = string
  default     = null

  validation {
    condition     = var.function_image_tag == null || can(regex("^([A-Za-z0-9_][A-Za-z0-9._-]{0,127}|sha256:[0-9a-f]{64})$", var.function_image_tag)) && var.function_image_tag != "latest"
    error_message = "Expected a tag, and not latest, or a digest sha256:..."
  }
}

variable "function_memory_mb" {
  description = "Memory of the function, MB: 1769 are one vCPU."
  type        = number
  default     = 1769

  validation {
    condition     = var.function_memory_mb >= 128 && var.function_memory_mb <= 10240
    error_message = "Expected 128 to 10240 MB."
  }
}

variable "function_timeout_s" {
  description = "Time limit of an invocation, s. Its successor starts before it."
  type        = number
  default     = 900

  validation {
    condition     = var.function_timeout_s >= 30 && var.function_timeout_s <= 900
    error_message = "Expected 30 to 900 s, which is AWS's limit."
  }
}

variable "function_ephemeral_mb" {
  description = "Size of the function's /tmp, MB."
  type        = number
  default     = 512

  validation {
    condition     = var.function_ephemeral_mb >= 512 && var.function_ephemeral_mb <= 10240
    error_message = "Expected 512 to 10240 MB."
  }
}

variable "function_concurrency" {
  description = "Reserved concurrency: twice data.workers, because a successor starts beside its predecessor. AWS keeps 100 of the account's quota unreserved."
  type        = number
  default     = 16

  validation {
    condition     = var.function_concurrency >= 2 && floor(var.function_concurrency) == var.function_concurrency
    error_message = "Expected a whole number of 2 or more."
  }
}

# --- Kafka ---

variable "kafka_mode" {
  description = "msk: Amazon MSK, provisioned, for long-lived systems. self_managed: KRaft on EC2, ready in minutes, for jobs of hours. msk_serverless: see README.md first."
  type        = string
  default     = "msk"

  validation {
    condition     = contains(["msk", "self_managed", "msk_serverless"], var.kafka_mode)
    error_message = "Expected msk, self_managed or msk_serverless."
  }
}

variable "kafka_broker_count" {
  description = "Brokers. self_managed: 1 (data is lost with its machine) or 3; fixed by the first apply. msk: a multiple of zone_count."
  type        = number
  default     = 3

  validation {
    condition     = var.kafka_mode != "self_managed" || contains([1, 3], var.kafka_broker_count)
    error_message = "Expected 1 or 3 with kafka_mode self_managed: two nodes lose their quorum when either fails."
  }

  validation {
    condition     = var.kafka_mode != "msk" || (var.kafka_broker_count > 0 && var.kafka_broker_count % var.zone_count == 0)
    error_message = "Expected a multiple of zone_count with kafka_mode msk."
  }
}

variable "kafka_volume_gb" {
  description = "Disk of each broker, GB: retention (data.retention_hours) times rate times record size times 3 copies over the brokers, times 1.5."
  type        = number
  default     = 100

  validation {
    condition     = var.kafka_volume_gb >= 10 && var.kafka_volume_gb <= 16000
    error_message = "Expected 10 to 16000 GB."
  }
}

variable "kafka_instance_type" {
  description = "self_managed: type of the brokers."
  type        = string
  default     = "m7g.medium"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", var.kafka_instance_type))
    error_message = "Expected an instance type such as m7g.medium."
  }
}

variable "kafka_image" {
  description = "self_managed: Apache Kafka's image. With nat_mode none: a copy of it in the stack's repository."
  type        = string
  default     = "apache/kafka:4.1.1"

  validation {
    condition     = can(regex("^[a-z0-9][A-Za-z0-9./_-]*(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})$", var.kafka_image)) && !endswith(var.kafka_image, ":latest")
    error_message = "Expected an image with a version, such as apache/kafka:4.1.1, and not latest."
  }

  validation {
    condition     = var.nat_mode != "none" || var.kafka_mode != "self_managed" || strcontains(var.kafka_image, ".dkr.ecr.")
    error_message = "With nat_mode none, hosts cannot reach public registries: push Kafka's image into the stack's repository and set it here."
  }
}

variable "msk_instance_type" {
  description = "msk: type of the brokers."
  type        = string
  default     = "kafka.m7g.large"

  validation {
    condition     = can(regex("^(express\\.|kafka\\.)[a-z0-9]+\\.[a-z0-9]+$", var.msk_instance_type))
    error_message = "Expected a broker type such as kafka.m7g.large."
  }
}

variable "msk_kafka_version" {
  description = "msk: version of Kafka."
  type        = string
  default     = "3.9.x"
}

# --- cache ---

variable "cache_mode" {
  description = "self_managed: Valkey on the control host. elasticache: Valkey in two zones; its password is then in the state."
  type        = string
  default     = "self_managed"

  validation {
    condition     = contains(["self_managed", "elasticache"], var.cache_mode)
    error_message = "Expected self_managed or elasticache."
  }
}

variable "cache_image" {
  description = "self_managed: Valkey's image. With nat_mode none: a copy of it in the stack's repository."
  type        = string
  default     = "valkey/valkey:8.1-alpine"

  validation {
    condition     = can(regex("^[a-z0-9][A-Za-z0-9./_-]*(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})$", var.cache_image)) && !endswith(var.cache_image, ":latest")
    error_message = "Expected an image with a version, such as valkey/valkey:8.1-alpine, and not latest."
  }

  validation {
    condition     = var.nat_mode != "none" || var.cache_mode != "self_managed" || strcontains(var.cache_image, ".dkr.ecr.")
    error_message = "With nat_mode none, hosts cannot reach public registries: push Valkey's image into the stack's repository and set it here."
  }
}

variable "cache_memory_mb" {
  description = "self_managed: memory of the cache, MB. It needs weights times blobs.keep_versions, and a gradient per worker; for asp, vap, ssp, essp and wsp also weights per worker."
  type        = number
  default     = 2048

  validation {
    condition     = var.cache_memory_mb >= 64
    error_message = "Expected 64 MB or more."
  }
}

variable "elasticache_node_type" {
  description = "elasticache: type of the two nodes."
  type        = string
  default     = "cache.m7g.large"

  validation {
    condition     = can(regex("^cache\\.[a-z0-9]+\\.[a-z0-9]+$", var.elasticache_node_type))
    error_message = "Expected a node type such as cache.m7g.large."
  }
}

# --- schema registry, of jobs with data.format.registry ---

variable "schema_registry_login" {
  description = "The schema registry asks for a log-in: hosts wait for the secret doll/NAME/schema-registry, in which you put it (README.md, Schema registry)."
  type        = bool
  default     = false
}

variable "schema_registry_ca" {
  description = "Certificates of the authority that signed the schema registry's certificate, PEM; null: a public one, or no TLS."
  type        = string
  default     = null

  validation {
    condition     = var.schema_registry_ca == null || try(startswith(trimspace(var.schema_registry_ca), "-----BEGIN CERTIFICATE-----"), false)
    error_message = "Expected PEM that begins with -----BEGIN CERTIFICATE-----: of certificates, never of a key."
  }
}

variable "schema_registry_cidrs" {
  description = "Address ranges of a schema registry whose port is not 443, to which workers and the control host may connect."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.schema_registry_cidrs : can(cidrnetmask(cidr)) && try(tonumber(split("/", cidr)[1]) > 0, false)])
    error_message = "Expected IPv4 ranges such as 10.1.0.0/16, and not the whole internet."
  }
}

variable "schema_registry_port" {
  description = "Port of the schema registry in schema_registry_cidrs. 443 is always open."
  type        = number
  default     = 8081

  validation {
    condition     = var.schema_registry_port > 0 && var.schema_registry_port < 65536
    error_message = "Expected a port, 1 to 65535."
  }
}

# --- control host ---

variable "control_instance_type" {
  description = "Instance type of the host of parameter server, provisioner, evaluator and self-managed cache; on-demand, of the workers' architecture unless doll's image supports both."
  type        = string
  default     = "m6i.xlarge"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", var.control_instance_type))
    error_message = "Expected an instance type such as m6i.xlarge."
  }
}

variable "control_volume_gb" {
  description = "Root volume of the control host, GB: images, and the run folder."
  type        = number
  default     = 50

  validation {
    condition     = var.control_volume_gb >= 30
    error_message = "Expected 30 GB or more: the machine image needs them."
  }
}

variable "shards" {
  description = "Number of processes of the control host among which the model is divided, the job's ps.shards; 1: the parameter server has the whole model. It counts when the host is created: for another number, replace it (terraform apply -replace=module.control.aws_instance.this)."
  type        = number
  default     = 1

  validation {
    condition     = var.shards >= 1 && var.shards <= 32 && floor(var.shards) == var.shards
    error_message = "Expected a whole number from 1 to 32, as `doll plan` says for ps.shards: auto."
  }
}

# --- monitoring ---

variable "alarm_email" {
  description = "E-mail address for alarms, which must confirm AWS's subscription; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.alarm_email == null || can(regex("^[^@ ]+@[^@ ]+$", var.alarm_email))
    error_message = "Expected an e-mail address."
  }
}

variable "alarm_topic_arn" {
  description = "An SNS topic of yours that alarms and the budget are sent to, in place of one of the stack's own; its policy must let cloudwatch.amazonaws.com and budgets.amazonaws.com publish; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.alarm_topic_arn == null || can(regex("^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_.-]+$", var.alarm_topic_arn))
    error_message = "Expected the ARN of an SNS topic such as arn:aws:sns:us-east-1:123456789012:oncall."
  }
}

variable "budget_usd_per_month" {
  description = "AWS notifies when 80 % and 100 % of it are spent, and when the month's forecast exceeds it, USD; 0: no budget. The job's own limit is plan.budget_usd in the job file."
  type        = number
  default     = 0

  validation {
    condition     = var.budget_usd_per_month >= 0
    error_message = "Expected 0 (none) or more USD."
  }
}

variable "log_retention_days" {
  description = "Days for which CloudWatch keeps logs."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_retention_days)
    error_message = "Expected one of CloudWatch's values: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, ..."
  }
}
