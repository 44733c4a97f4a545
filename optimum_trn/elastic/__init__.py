"""Training that survives: pipelines that are rebuilt from the nodes that are left, and checkpoints in their memory."""
