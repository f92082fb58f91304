"""Views for people and Prometheus: text, pages, reports, metrics."""
