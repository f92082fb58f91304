"""Measurements of DOLL against yardsticks; see docs/benchmarks.md."""
