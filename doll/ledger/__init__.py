"""The proof that every sample counts exactly once: generations, valid updates, balance, audit, dead letters."""
