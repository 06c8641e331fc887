"""Random lives of a model whose values come and go, against a dict of value -> row."""
