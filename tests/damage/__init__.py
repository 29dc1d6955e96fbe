"""Damage to files and to slots, as a user of the public face meets it."""
