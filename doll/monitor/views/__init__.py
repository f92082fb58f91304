"""What people and Prometheus are shown of it: text, pages, reports, metrics."""
