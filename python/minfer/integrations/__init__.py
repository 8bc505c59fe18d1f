"""minfer in models and engines of others.

:mod:`minfer.integrations.decoder` is what a decoder layer needs, whoever calls it: projections in every weight format, attention, MLPs and
experts. :mod:`minfer.integrations.transformers` hangs it into Hugging Face models. Nothing here is imported with minfer itself.
"""
