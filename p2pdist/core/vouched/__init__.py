"""A host's part in vouched piece lists: when it judges the whole, and how far it reads ahead."""
