"""What stands behind the public modules: wrappers, their plans, buffers and workspaces, and replayed calls."""
