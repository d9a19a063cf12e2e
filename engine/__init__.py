"""What makes a run fast and safe. Nothing here changes a number: `--plain` takes the slow, obvious path
instead."""
