"""A whole job on this machine.

`up` runs a job from an empty folder to its report: `preflight` checks it first, `running` starts and ends its roles,
`follower` follows them, `finish` makes the report. `context` is what these share, and what can accompany a run, as
`doll_lab.spot` does. `resume` resumes a run, `compare` makes one for each policy. `roles` are the roles of a job,
however their processes are started.
"""
