"""`python -m matrixdp`: the command line, also where the command `matrixdp` is not on the path."""

from matrixdp.cli import main

if __name__ == "__main__":
    main()
