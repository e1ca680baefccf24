"""What plans, rank programs, predictions and emitted code are, as digests: see `cases` and `texts`."""
