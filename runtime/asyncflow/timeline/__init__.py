"""Where the seconds of a run go: tracks of spans, the cause of each idle second, and pictures of them."""
