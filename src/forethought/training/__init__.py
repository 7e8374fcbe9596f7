"""Training: the loop, evaluation, checkpoints of a run, gates and signals."""
