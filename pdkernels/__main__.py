"""``python -m pdkernels``."""

from pdkernels.cli import main

if __name__ == "__main__":
    main()
