"""From a Python function over torch tensors to a graph.

The function runs once, on proxies. What torch functions give, in which dtype and shape, is asked of torch itself, with meta tensors; what
they compute becomes nodes. Floating-point numbers are float32 within a function, whatever dtype torch says: they are rounded where the
function casts, and where results are stored.
"""

from . import operations
from .operand import Operand
from .proxy import Proxy
from .table import Table
from .tracer import Tracer

__all__ = ["Operand", "Proxy", "Table", "Tracer", "operations"]
