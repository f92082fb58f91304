"""The parameter server's decisions: events in, actions out, with time as an argument. Pure."""
