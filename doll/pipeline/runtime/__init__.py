"""A running virtual worker: its protocol with its stages, and the process of one stage."""
