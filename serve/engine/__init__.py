"""The engine: which requests run, what is drafted, what is verified and what is kept."""
