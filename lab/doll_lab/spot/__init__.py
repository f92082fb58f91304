"""`doll spot`: a whole job on this machine, with workers on a replayed spot market."""
