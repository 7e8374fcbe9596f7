"""Slow, obvious references of the agents, and the tests that hold the fast code to them."""
