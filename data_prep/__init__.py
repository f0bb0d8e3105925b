"""Text before any hidden state: conversations, the target's answers, tokens, loss masks, draft vocabulary."""
