"""The demo's second act: a model from a hub to all agents by snapshot_download, and its tensors in
memory."""
