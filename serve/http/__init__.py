"""The HTTP surface: OpenAI's routes, the administrator's, and the probes."""
