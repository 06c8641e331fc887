"""Argument checks, lazy names, logs and contact between ranks, for every folder of `recsys`.

No file here imports another folder.
"""
