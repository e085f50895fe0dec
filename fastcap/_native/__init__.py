"""Built modules and their hand-written stubs."""
