"""Developer tools of the project; `make` calls them."""
