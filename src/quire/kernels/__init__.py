"""Who computes attention. Each folder (or module) here is a family; `registry` says what a family answers."""
