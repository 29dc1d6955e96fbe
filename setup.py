"""The one thing that pyproject.toml cannot say yet without a warning: the loops of the codec in C.

Where they cannot be compiled the install goes on, and they run in numpy: slower, the same bytes.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "everstep.codec._kernel",
            sources=["engine/codec/_kernel.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
