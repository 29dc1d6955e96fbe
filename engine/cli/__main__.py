"""``python -m everstep.cli``."""

from .main import main

main(prog_name="everstep")
