"""Forward passes: one model over ragged rows of a static cache, as fast as the device allows."""
