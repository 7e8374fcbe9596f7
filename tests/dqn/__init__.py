"""The DQN family: tests named after the findings of seed 004, and what stands beside them."""
