"""A whole job on this machine.

`up` runs a job from an empty folder to its report: `earlier_runs` and `preflight` check it first, `role_specs`,
`running` and `follower` start and follow its roles, `shutdown` and `finish` end it; `hooks` can accompany it, as
`doll.run.spot` does. `resume` resumes a run, `compare` makes one for each policy. `roles` are the entry points of the
processes, `standalone` starts one of them without the others.
"""
