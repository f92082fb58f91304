"""Pods as machines: `pods` says what they are and what their states mean, `fleet` talks to the API server."""
