"""Named workloads that measure the engine, with the floors of the machine beside them."""
