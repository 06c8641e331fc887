"""MovieLens as samples for training, for the examples."""
