"""Sharding is invisible, shown over a matrix of everything that can be combined.

``matrix.py`` says what the combinations are, ``compare.py`` holds one of them against the
unsharded model, ``bounds.py`` says how far a narrow wire may lead, ``checkpoints.py`` saves under
one plan and loads under another. ``python -m tests.conformance`` runs all of it; pytest a cover.
"""
