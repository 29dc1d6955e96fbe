"""The one thing that pyproject.toml cannot say yet without a warning: loops of the codec, and copies, in C.

Where they cannot be compiled the install goes on, and they run in numpy and torch: slower, the same bytes.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "everstep.codec._kernel",
            sources=["engine/codec/_kernel.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "everstep.memory._copying",
            sources=["engine/memory/_copying.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ]
)
