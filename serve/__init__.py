"""The service: an engine that speculates, and an OpenAI-compatible endpoint in front of it.

Start at `engine` (steps and slots), then `api` (HTTP), `capture` (what leaves for the emitter).
"""
