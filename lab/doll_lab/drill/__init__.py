"""Fault injection: the plan (pure), the recovery times (pure), and the code that injects the faults."""
