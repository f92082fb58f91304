"""The provisioner: machines for a job's workers, in the markets that meet the deadline at the least cost.

`controller` orders the effects of a turn, `planning` chooses markets, `reconcile` turns the choice into launches and
terminations, and `fleets` carries them out. `main` is the process around it.
"""
