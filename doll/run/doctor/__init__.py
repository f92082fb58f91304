"""`doll doctor`: checks whether the services of a job allow each role to work, and gives advice if they do not.

`examine` selects the checks of a role and asks the services. `checks` (pure) judges their answers and formats the
results.
"""
