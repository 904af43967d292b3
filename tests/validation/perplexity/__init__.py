"""Does RoPE, and do more heads, lower the perplexity? A small language model, trained here."""
