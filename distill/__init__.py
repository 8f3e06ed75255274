"""A trace at work: training a drafter on opened traces and measuring whether it got better.

Start at `job` (one run from selection to registration), then `selection`, `trainer`, `replay`.
"""
