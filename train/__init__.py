"""Stage 3: optimising a drafter on one or many devices. Start reading at loop.py."""
