"""How soon trainers reach an acceptance length: minutes, tokens and FLOPs, by real decoding (docs/speedrun.md)."""
