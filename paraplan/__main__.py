"""`python -m paraplan`: the `paraplan` command, for launchers that start modules."""

from paraplan.cli import main

if __name__ == "__main__":
    main()
