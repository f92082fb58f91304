"""`doll doctor`: what each role of a job must be able to do, asked of its services, and what to do if it cannot.

`gather` asks, `checks` (pure) judges the answers and shows them.
"""
