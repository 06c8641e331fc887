"""Rows of ids: hashed ids, the index of a table, rows on the disk. No path here is public."""
