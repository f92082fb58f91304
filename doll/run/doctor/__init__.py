"""`doll doctor`: what each role of a job must be able to do, asked of its services, and what to do where it cannot.

`gather` asks, `checks` (pure) judges the answers, `report` shows them.
"""
