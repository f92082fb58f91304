"""A job on machines that a market preempts: the market, its clock, the machines and the workers on them."""
