"""The broker of a commit beside that of the work tree, in alternating pairs."""
