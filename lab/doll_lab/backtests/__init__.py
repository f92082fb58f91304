"""Backtests: the planner and baseline policies on recorded spot markets."""
