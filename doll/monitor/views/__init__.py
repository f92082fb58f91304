"""What people and Prometheus are shown of it: text, panels, reports, plots, metrics."""
