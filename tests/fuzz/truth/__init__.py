"""Operators in float64, written from their documentation alone, and what roundings may do to them; one file a kind of operator."""
