"""What each paper says, and where it is here; a module for each paper. `bench.papers.by_paper` makes a page of it."""
