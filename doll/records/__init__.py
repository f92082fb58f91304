"""Records on the wire: control records, packed samples, bounds of input from outside, refusals."""
