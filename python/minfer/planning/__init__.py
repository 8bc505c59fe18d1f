"""What would run for a problem and why, and the tables of what measured fastest."""
