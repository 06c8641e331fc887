"""The ranks of a job, and what they say to each other.

`env` and `node` say who they are; `comm` has the collectives, over `wire` formats; what the
ranks are about to do is compared by `agreement`, and `construction` builds a model on all of
them or on none.
"""
