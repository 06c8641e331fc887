"""The only package that talks to fbgemm_gpu: jagged ops and lookups of many tables, on tensors.

Every kernel has a pure-PyTorch twin. It serves where FBGEMM is not installed or does not support a
configuration, and it is the numerical reference of the tests. `RECSYS_KERNELS=torch` forces it.
"""
