"""Mutation tests: lines of the library are changed, one at a time, and the tests run.

`trace` records the lines that each test executes, `mutate` changes a line, `choose` selects the
cases of `make test`, and `__main__` is the command.
"""
