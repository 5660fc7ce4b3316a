"""Data-parallel backends: where gradients and optimizer state are held, and how ranks sum and share them."""
