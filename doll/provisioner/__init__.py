"""Which worker runs in which market, and what becomes of that decision."""
