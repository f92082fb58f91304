"""The proof that every sample counts exactly once: lineage, valid updates, balance, audit and dead letters."""
