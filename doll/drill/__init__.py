"""Faults on purpose: what to break when (pure), how long until the job goes on (pure), and the hands that break it."""
