"""The parameter server's decisions: a pure state machine that takes events and the time, and returns actions."""
