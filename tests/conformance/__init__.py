"""Sharding is invisible, shown over a matrix of everything that can be combined.

``matrix.py`` lists the combinations; ``compare.py`` compares each with the unsharded model.
``bounds.py`` bounds the errors of a narrow wire. ``checkpoints.py`` saves under one plan and loads
under another. ``python -m tests.conformance`` runs all of it; pytest a cover.
"""
