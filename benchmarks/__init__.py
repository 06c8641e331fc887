"""Benchmarks beside TorchRec and the physical floor; `make bench` and `make gpu` run them."""
