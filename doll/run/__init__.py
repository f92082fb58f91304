"""Running a job on this machine, and reading what a run has left.

`local` runs a whole job. `folder`, `target`, `status`, `export` and `examples` find and read jobs and runs.
"""
