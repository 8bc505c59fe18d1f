"""The operators, a file a family: each declared once, with its signature, its documentation, its checks and its reference."""
