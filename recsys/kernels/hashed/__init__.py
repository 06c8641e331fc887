"""Hash index: the rows of embedding tables by any 64-bit id."""
