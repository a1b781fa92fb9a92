"""How fast dfca is, measured side by side: `python -m benchmarks`, or `make bench`.

Five parts, each a module with `rows(options, tick)`, a generator of finished rows:
floor      the same forward and backward passes in bare torch
peers      the same rounds in other libraries, each in an environment of its own
scaling    seconds and memory against N, k, P and degree
ranks      one process against two
events     the event simulator without training and with it, and elections in virtual time

Only ratios of times that were taken in turn (A B A B ...) mean anything on a machine that does other things too.
"""
