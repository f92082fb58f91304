"""The layers of a model, and the time and memory that each needs: the input of the planner."""
