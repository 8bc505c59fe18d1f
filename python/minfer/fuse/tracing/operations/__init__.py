"""What calls of torch's functions become in a graph. Each module enters its functions into handlers.HANDLERS."""

from . import casts, compositions, constants, elementwise, reductions, stores, views

__all__ = ["casts", "compositions", "constants", "elementwise", "reductions", "stores", "views"]
