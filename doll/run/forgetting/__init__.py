"""`doll forget`: removes records from a model, by computing it again without them."""
