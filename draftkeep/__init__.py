"""draftkeep keeps a drafter matched to the traffic it serves, and that traffic private.

The rooms, in the order in which they may import one another: the root's own modules; then
`policies` and `kernels`; `ingest`; `store`; `distill` and `serve`; `cli`. See
`docs/architecture.md`.
"""

__version__ = "0.1.0"
