"""Decisions, and the keys that enforce them.

Start at `tenant` (who may do what), `keyring` (the keys behind every deadline), `retention`
(periods and expiry) and `gate` (which drafters may serve).
"""
