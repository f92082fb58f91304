"""DOLL from Python: `doll.train`, `doll.open` and the handle of a run that they return."""
