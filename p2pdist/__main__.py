"""`python -m p2pdist` is the `p2pdist` command."""

from p2pdist.cli.main import main

main()
