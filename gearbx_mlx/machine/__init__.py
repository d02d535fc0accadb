"""What the machine can bear, and what follows from it for the weights. Knows numbers, no models."""
