"""How a chunk of an image is coded, with or without the same chunk of a base."""
