"""Runs a job on this machine, and reads the files of a run.

`local` runs a whole job. `folder`, `target`, `status`, `export` and `examples` find and read jobs and runs.
"""
