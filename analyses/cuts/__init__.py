"""Linear maps of the stream at the cuts of pruned models, and what these models write."""
