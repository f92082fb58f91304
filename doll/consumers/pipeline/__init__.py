"""A worker that is a pipeline: gradients that are computed by stages in processes of their own."""
