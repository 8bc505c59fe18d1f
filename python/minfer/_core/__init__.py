"""What every operator stands on: the compiled library, the declaration of an operator, torch's private interfaces, the registry."""
