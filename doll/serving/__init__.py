"""The model server (`doll serve`): answers for a job's model, whose versions it follows while they are learned."""
