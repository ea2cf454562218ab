"""What feed-forward layers write, read in the vocabulary (paper B)."""
