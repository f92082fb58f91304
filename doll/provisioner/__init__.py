"""The provisioner: it launches and ends the machines of a job's workers. It chooses the markets with the lowest cost
that meet the deadline.

`controller` carries out a turn and defines the order of its effects. `planning` chooses markets, `reconcile` converts
the choice to launches and terminations, and `fleets` carries these out. `main` is the process that runs the controller.
"""
