"""Models at rest: targets as they are found and loaded, drafters as they are made and verified."""
