"""Shards of the model: processes that hold slices of it, under the one engine (docs/decisions/0141)."""
