"""The user's side of a job: model, records, loss and metrics, for any format and for JSON."""
