"""Pods as machines: `pods` defines pods and the meaning of their states, `fleet` calls the API server."""
