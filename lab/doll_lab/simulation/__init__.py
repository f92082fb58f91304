"""The whole system in virtual time: the production engine and policies, simulated workers, nothing sleeps."""
