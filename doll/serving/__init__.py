"""The model server (`doll serve`): answers requests with a job's model, and follows its versions during training."""
