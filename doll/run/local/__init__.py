"""Runs a whole job on this machine.

`up` runs a job from an empty folder to its report. `preflight` checks the job first, `running` starts and ends its
roles, `follower` reads their records, and `finish` writes the report. `context` contains the data that these modules
share, and the hook with which other code, such as `doll_lab.spot`, takes part in a run. `resume` resumes a run;
`compare` runs a job once for each policy. `roles` contains the roles of a job, independent of how their processes are
started.
"""
