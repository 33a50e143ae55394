"""`python -m loadtest.peers --help`."""

from loadtest.peers.bench import main

if __name__ == "__main__":
    main()
