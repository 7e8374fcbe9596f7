"""Faults injected on purpose: what a run survives, and what it says; docs/faults.md lists them."""
