"""The ranks of a job, and their exchanges.

`env` and `node` describe the ranks. `comm` has the collectives, with the number formats of `wire`;
`awaitables` are results in progress. `agreement` compares the next actions of all ranks, and
`build_transaction` builds a model on all of them or on none. `position` and `heartbeats` record the
stage of each rank.
"""
