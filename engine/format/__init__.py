"""What is stored, byte for byte: names, layouts, images, votes, manifests, records. Pure; no I/O, no torch.

FORMAT.md beside this package is the normative text.
"""
