"""Where torch has the operators: ``torch.ops.minfer``; of a copy that is built for the kernels hub, a namespace of its own."""

import torch

NAMESPACE = "minfer"

ops = getattr(torch.ops, NAMESPACE)
