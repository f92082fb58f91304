"""The fleet on EC2: `Ec2Fleet`, its error codes, interruption notices and placement scores."""
