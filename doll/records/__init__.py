"""Records on the wire: control records, packed samples, bounds of what comes from outside, what was refused."""
