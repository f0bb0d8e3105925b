"""What a training run looks like: curves, as pictures and as one page."""
