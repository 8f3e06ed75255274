"""The service: an engine that speculates, and an OpenAI-compatible endpoint in front of it.

The files here are a node: `node` joins its parts, `runserver` is its process, `capture` with
`outbox` and `sealing` is what leaves for the log, `follow` is the drafter's way in, `metrics` and
`exposition` are what is counted. `engine/` makes tokens (steps, slots, drafts), `passes/` runs the
models for it, `http/` is the endpoint.
"""
