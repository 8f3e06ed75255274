"""`draftkeep doctor`: its checks by what they look at, and what each found. Start at `run`."""
