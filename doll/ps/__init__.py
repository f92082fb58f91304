"""The parameter server: a pure engine with consistency policies, and the runner that connects it to the world."""
