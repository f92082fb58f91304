"""The provisioner: it launches and ends the machines of a job's workers, in the markets with the lowest cost within the
deadline.

`controller` defines the order of the effects of a turn, `planning` chooses markets, `reconcile` turns the choice into
launches and terminations, and `fleets` carries these out. `main` is the process that runs the controller.
"""
