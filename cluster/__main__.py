"""`python -m cluster` is `moetis`: for `ray job submit`, where nothing is installed."""

from cluster.cli import main

main()
