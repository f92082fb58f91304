"""Views for users and Prometheus: text, pages, reports, metrics."""
