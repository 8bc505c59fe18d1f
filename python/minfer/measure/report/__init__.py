"""One HTML page of all results files, which opens without a network: ``minfer report``."""

from .page import Report, read_report, write_page

__all__ = ["Report", "read_report", "write_page"]
