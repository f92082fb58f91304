"""Workers: Algorithm 1 (batches out of a stream) and Algorithm 2 (gradients on demand), on Faust."""
