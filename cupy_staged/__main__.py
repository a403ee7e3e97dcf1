"""`python -m cupy_staged` is the command line, `cupy-staged`."""

from cupy_staged.cli import main

main()
