"""What all other packages stand on, and what stands on none of them: files, locks, errors, the console."""
