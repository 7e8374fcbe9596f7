"""Networks and their parts: layers, activations, initialisation, optimisers, precision."""
