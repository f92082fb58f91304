"""Running a job on this machine, and reading what a run has left.

`job` runs a job from an empty folder to its report: `earlier_runs` and `preflight` check it first, `role_specs`,
`learning` and `follower` start and follow its roles, `shutdown` and `finish` end it; `hooks` can accompany it, as the
`spot` modules do. `resume` resumes a run. `roles` are the entry points of the processes, `standalone` starts one of
them without the others. `folder`, `target`, `status`, `export` and `examples` find and read jobs and runs.
"""
