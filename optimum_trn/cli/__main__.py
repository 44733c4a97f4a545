"""`python -m optimum_trn.cli`, where the `optimum-trn` script is not on the path."""

from optimum_trn.cli import main

if __name__ == "__main__":
    main()
