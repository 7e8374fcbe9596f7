"""Planners. They see action sequences and `score(actions) -> values`, never a model."""
