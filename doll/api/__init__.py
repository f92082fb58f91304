"""The Python interface of DOLL: `doll.train`, `doll.open`, and the `Run` that both return."""
