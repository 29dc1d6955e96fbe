"""The state tree: what a rank's state is made of, as entries and plain values, and back into live objects."""
