"""Which tests notice a fault: lines of the library are changed, one at a time, and tests run.

`trace` records the lines that each test executes, `mutate` changes a line, and `__main__` draws
lines by a seed and runs the tests that execute them.
"""
