"""Invocations of a function on AWS Lambda as instances."""
