"""Several hosts on one machine: each a network namespace with an address of its own, and a router between them."""
