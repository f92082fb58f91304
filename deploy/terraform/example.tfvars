# terraform apply -var-file=example.tfvars
#
# A stack for jobs of some hours: self-managed Kafka on three small machines, the cache on the control host, one NAT
# gateway. About 0.41 $/h in us-east-1 before the first worker (README.md, Costs).

name   = "clicks"
region = "us-east-1"

# Pushed after the first apply; any tag except latest.
image_tag = "2026-11-21"

# Ready in minutes. For a long-lived system: msk.
kafka_mode         = "self_managed"
kafka_broker_count = 3

cache_mode = "self_managed"

# Six or more types of similar size, so that some pool has spot capacity.
worker_instance_types = ["c5.xlarge", "c5a.xlarge", "c6i.xlarge", "c6a.xlarge", "m5.xlarge", "m6i.xlarge"]

# Without a receiver every plan warns that nobody hears the alarms. Or: alarm_topic_arn, an SNS topic of yours.
# alarm_email          = "oncall@example.com"
# budget_usd_per_month = 500
