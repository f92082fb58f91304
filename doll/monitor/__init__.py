"""What is known about a job, for people and dashboards: history, rates, progress, reports, plots, Prometheus."""
