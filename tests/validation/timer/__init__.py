"""How repeatable the timing engine is, against what people use instead. Knows no torch."""
