"""`python -m stormplus`."""

from stormplus.cli import main

if __name__ == "__main__":
    main()
