"""State by names of parameters, chunks of a model, and values that belong to a rank."""
