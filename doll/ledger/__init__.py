"""The proof that every sample counts exactly once: the lineage, valid updates, balance, audit, dead letters."""
