"""The service: an engine that speculates, and an OpenAI-compatible endpoint in front of it.

The files here are a node. `node` joins its parts, `assembly` makes them, and `runserver` is the
process around it. The engine has a thread of its own, and so have two others beside it: one follows
the channel to the next drafter, one keeps house (expired keys, accounts of what was lost). A
captured request's trace waits for its delivery, is built, sealed and logged. What a node counts is
exposed as metrics, what it was asked is one line each in the log, and limits say how much a tenant
may ask.

`engine/` makes tokens (steps, slots, drafts), `passes/` runs the models for it, `http/` is the
endpoint.
"""
