"""A run: everything of one job on this machine, from an empty folder to an audited, exported model."""
