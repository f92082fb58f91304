"""The layers of a model, and what each takes: the input of the planner."""
