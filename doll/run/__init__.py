"""Running a job on this machine, and reading what a run has left.

`local` runs a whole job, `spot` its workers on machines that a market preempts. `folder`, `target`, `status`, `export`
and `examples` find and read jobs and runs.
"""
