"""Training: the loop, the episode runner, evaluation, checkpoints of a run, gates and signals."""
