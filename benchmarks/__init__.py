"""Benchmarks of DOLL against reference programs; see docs/benchmarks.md."""
