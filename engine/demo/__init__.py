"""The demonstration: a small training job that is killed in three ways and goes on bit for bit.

``train`` is the job itself and an example of how to adopt everstep; ``story`` starts it, kills it and
compares.
"""
