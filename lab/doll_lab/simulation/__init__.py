"""The whole system in virtual time: the production engine and policies with simulated workers; nothing sleeps."""
