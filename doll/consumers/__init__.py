"""Workers: Algorithm 1 (batches from a stream) and Algorithm 2 (gradients on demand), on Faust."""
