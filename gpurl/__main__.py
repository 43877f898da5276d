"""`python -m gpurl` is the command `gpurl`."""

from gpurl.cli.main import run

if __name__ == "__main__":
    run()
