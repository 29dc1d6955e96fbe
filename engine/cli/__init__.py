"""The command line. Imports no torch, so that help is there at once and `ls`, `show`, `fsck` run without it."""
