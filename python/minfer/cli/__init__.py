"""The command line: ``minfer info | plan | tune | demo``."""
